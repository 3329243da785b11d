"""Values lie in memory as ops return them: where a trace has it wrong, peaks and bits are right still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import rematc
from rematc.costs import Table
from rematc.passes.laid_out import lay_out
from tests.joints import joint_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
CPU = torch.device("cpu")
SHARES = 1.0, 1.4  # of the smallest budget


class Nearest(nn.Module):
    """The gradient of a loss has the strides of its target, which convolution's backward pass then takes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 16, 4, 2, 1), nn.Conv2d(16, 16, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.leave(F.silu(self.enter(x))).permute(0, 2, 3, 1)
        return F.mse_loss(made, made.detach().contiguous().round())


class Turned(nn.Module):
    """The gradient of a product has a view, flat, that there is not of what `hardswish_backward` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(F.hardswish(first(x.transpose(0, 1)).transpose(0, 1))).sin()
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nearest": (Nearest, (4, 3, 32, 32)),
    "turned": (Turned, (8, 64, 16)),
}


def verified(name: str, budget: Any) -> rematc.Verification:
    torch._dynamo.reset()
    torch.manual_seed(1)
    make, shape = MODELS[name]
    return rematc.verify(make(), torch.randn(shape), budget, inner="eager", costs="roofline")


@pytest.mark.parametrize("name", MODELS)
def test_the_budget_is_a_bound_and_the_bits_are_eager_s(name: str) -> None:
    with pytest.raises(rematc.BudgetError) as refused:
        verified(name, 1)
    for share in SHARES:
        found = verified(name, int(share * refused.value.minimum_bytes))
        assert found.difference == 0
        assert 0.97 * found.predicted_bytes <= found.measured_bytes <= found.predicted_bytes


# What is written into the graph


@rematc.pure
@torch.library.custom_op("test_laid_out::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos().t().contiguous().t()


@pair.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)  # wrong of the second


def _backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
    return first + second


pair.register_autograd(_backward)


def laid_out(fn: Callable[..., Any], *args: Any) -> tuple[dict[str, fx.Node], dict[str, Any]]:
    """The nodes by their names, and what they were before."""
    joint, _ = joint_of(fn, *args)
    before = {n.name: n.meta.get("val") for n in joint.graph.nodes}
    lay_out(joint, Table(CPU, None).taken)
    joint.graph.lint()
    return {n.name: n for n in joint.graph.nodes}, before


def stride(node: fx.Node) -> tuple[int, ...]:
    found: tuple[int, ...] = node.meta["val"].stride()
    return found


def test_what_is_computed_from_it_lies_otherwise_too() -> None:
    def fn(x: Tensor) -> Tensor:
        first, second = torch.ops.test_laid_out.pair(x)
        return (first.exp() * 2).sum() + (second.exp().view(4, 3) * 2).sum()

    nodes, before = laid_out(fn, torch.ones(4, 3, requires_grad=True))
    first, second = nodes["pair"].meta["val"]
    assert (first.stride(), second.stride()) == ((3, 1), (1, 4))
    assert first is before["pair"][0]
    assert (stride(nodes["getitem"]), stride(nodes["getitem_1"])) == ((3, 1), (1, 4))
    assert (stride(nodes["exp"]), stride(nodes["exp_1"])) == ((3, 1), (1, 4))
    assert nodes["exp"].meta["val"] is before["exp"]


def test_a_view_that_there_is_not_is_one_of_a_copy() -> None:
    def fn(x: Tensor) -> Tensor:
        return (torch.ops.test_laid_out.pair(x)[1].view(-1) * 2).sum()

    nodes, before = laid_out(fn, torch.ones(4, 3, requires_grad=True))
    (copied,) = nodes["view"].all_input_nodes
    assert copied.target is torch.ops.aten.clone.default
    assert (stride(copied), stride(nodes["view"])) == ((3, 1), (1,))
    assert nodes["view"].meta["val"] is before["view"]


def test_what_the_trace_says_rightly_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(144, 2))
    nodes, before = laid_out(lambda x: model(x).sum(), torch.ones(2, 3, 8, 8))
    assert all(node.meta.get("val") is before[name] for name, node in nodes.items())
