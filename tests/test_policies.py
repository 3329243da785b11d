"""Policies of selective checkpointing in the model: what must be recomputed is, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import rematc
from rematc.measure import measure

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*model has regions under torch.utils.checkpoint"),
]
WIDTH, ROWS, LAYERS = 32, 64, 3
aten = torch.ops.aten


def policy(asked: CheckpointPolicy, _: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_product = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else asked


class Layers(nn.Module):
    """Three layers, each in a region of its own; ``asked`` of all in it but matrix products."""

    def __init__(self, asked: CheckpointPolicy, dropout: float = 0.0) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.contexts = partial(create_selective_checkpoint_contexts, partial(policy, asked))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        def layer(y: Tensor, line: nn.Module, norm: nn.Module) -> Tensor:
            up, scale = norm(y).exp().split([WIDTH // 2, WIDTH // 2], 1)
            out: Tensor = y + F.dropout(
                line(torch.cat([up.sin(), scale.tanh()], 1)).exp().sin(), self.dropout
            )
            return out

        for line, norm in zip(self.lines, self.norms, strict=True):
            x = checkpoint(layer, x, line, norm, use_reentrant=False, context_fn=self.contexts)
        return x.square().mean()


def trained(
    asked: CheckpointPolicy, backend: Any, dropout: float = 0.0
) -> tuple[list[Tensor], Callable[[], None]]:
    """Gradients, and a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Layers(asked, dropout), torch.randn(ROWS, WIDTH)
    run = torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        run(x).backward()

    step()
    return [p.grad for p in model.parameters() if p.grad is not None], step


MUST, PREFER = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("inner", "dropout"),
    [
        ("eager", 0.0),
        ("eager", 0.5),
        pytest.param("inductor", 0.0, marks=pytest.mark.slow),
        pytest.param("inductor", 0.5, marks=pytest.mark.slow),
    ],
)
def test_what_must_be_recomputed_is_not_saved_though_there_is_room(inner: Any, dropout: float) -> None:
    backend = rematc.backend("1GB", inner=inner)
    found, step = trained(MUST, backend, dropout)
    expected, _ = trained(MUST, "aot_eager", dropout)
    if inner == "eager":
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    elif not dropout:  # Inductor draws other numbers
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    (plan,), (problem,) = backend.plans, backend.problems
    graph = problem.graph
    saved = {graph.values[v].name for v in plan.saved}
    assert not [name for name in saved if name.split("_")[0] in ("exp", "tanh", "cat")]
    if inner == "eager":
        in_backward = [op.target for op in graph.ops if op.phase == "backward"]
        assert in_backward.count("aten.tanh.default") == LAYERS
        free = rematc.backend("1GB", inner=inner)
        trained(PREFER, free, dropout)
        assert plan.peak_bytes < free.plans[0].peak_bytes
    assert plan.cost_ns == 0  # there was no choice
    measured = measure(step, warmup=2).peak_bytes
    assert measured <= plan.peak_bytes - problem.resident_bytes


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_rest_is_recomputed_too_where_the_budget_asks_for_it(inner: Any) -> None:
    backend = rematc.backend("1GB", inner=inner)
    expected, _ = trained(MUST, backend)
    tight = rematc.backend(int(0.9 * backend.plans[0].peak_bytes), inner=inner)
    found, step = trained(MUST, tight)
    rtol, atol = (0.0, 0.0) if inner == "eager" else (1e-4, 1e-5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    (plan,), (problem,) = tight.plans, tight.problems
    assert measure(step, warmup=2).peak_bytes <= plan.peak_bytes - problem.resident_bytes


@pytest.mark.parametrize("asked", [MUST, PREFER])
def test_what_must_be_saved_is_not_recomputed_though_there_is_no_room(asked: CheckpointPolicy) -> None:
    with pytest.raises(rematc.BudgetError) as refused:
        trained(asked, rematc.backend(1, inner="eager"))
    backend = rematc.backend(refused.value.minimum_bytes, inner="eager")
    found, _ = trained(asked, backend)
    expected, _ = trained(asked, "aot_eager")
    assert all(map(torch.equal, found, expected))
    (plan,), (problem,) = backend.plans, backend.problems
    ops = problem.graph.ops
    again = {ops[i].target for i in plan.backward if ops[i].phase == "forward"}
    assert again and "aten.addmm.default" not in again
    pins = [op.pin for op in ops if op.target == "aten.addmm.default"]
    assert pins == ["saved: a checkpoint policy in the model says so"] * LAYERS


def test_what_forward_returns_is_there_and_not_made_again() -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: MUST)

    def region(x: Tensor) -> Tensor:
        return x.sin().exp()

    def run(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(region, x, use_reentrant=False, context_fn=contexts)
        return out

    x = torch.linspace(0, 1, 16, requires_grad=True)
    backend = rematc.backend("1MB", inner="eager")
    torch.compile(run, backend=backend)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x.sin().exp() * x.cos()).detach())
    targets = [op.target for op in backend.problems[0].graph.ops]
    assert targets.count("aten.exp.default") == 1


def test_what_one_region_gives_to_the_next_is_left_to_the_plan() -> None:
    """Were it made again, backward would run all regions before it at once, all they make alive."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: MUST)

    def region(x: Tensor) -> Tensor:
        return x.sin().tanh().exp()

    def run(x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = checkpoint(region, x, use_reentrant=False, context_fn=contexts)
        return x.square()

    x = torch.linspace(0, 1, 16, requires_grad=True)
    backend = rematc.backend("1MB", inner="eager")
    torch.compile(run, backend=backend)(x).sum().backward()
    targets = [op.target for op in backend.problems[0].graph.ops]
    assert targets.count("aten.tanh.default") == 2 * LAYERS
    assert targets.count("aten.exp.default") == LAYERS
