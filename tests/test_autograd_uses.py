"""What people do around a compiled model with autograd: gradients to the bit, and the budget kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.cases import ROWS, SEVERAL, WIDTH, Case, Results, Trained, assert_as_without, assert_same_bits

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]
LAYERS, NUMBER = 4, 4  # the bytes of a number


class Net(nn.Module):
    """Layers with a ``middle`` between them, and a loss."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.middle(F.gelu(layer(x))).sin()
        return x.square().mean()


def leaf() -> Results:
    return (torch.randn(ROWS, WIDTH).requires_grad_(),)


def gradients(t: Trained) -> Results:
    return tuple(p.grad for p in t.model.parameters() if p.grad is not None)


# Losses and backward passes


def accumulated(t: Trained) -> Results:
    for _ in range(3):
        (t.run(*t.inputs) / 3).backward()
    return gradients(t)


def losses_summed(t: Trained) -> Results:
    (x,) = t.inputs
    (t.run(x) + 2 * t.run(x.cos())).backward()
    return gradients(t)


def losses_apart(t: Trained) -> Results:
    (x,) = t.inputs
    losses = [t.run(x), t.run(x.cos())]
    for loss in losses:
        loss.backward()
    return gradients(t)


def asked_for(t: Trained) -> Results:
    """Of parameters and of an input, and nothing is left in ``.grad``."""
    (x,) = t.inputs
    found = torch.autograd.grad(t.run(x), [x, *t.model.parameters()])
    assert x.grad is None and not gradients(t)
    return found


def some_asked_for(t: Trained) -> Results:
    (x,) = t.inputs
    return torch.autograd.grad(t.run(x), [x, next(t.model.parameters())])


def clipped(t: Trained) -> Results:
    """Steps of plain SGD, so that a wrong bit shows in all that follow."""
    (x,) = t.inputs
    t.run(x).backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
    with torch.no_grad():
        for p in t.model.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
    return (norm,)


def validated(t: Trained) -> Results:
    """Passes without gradients before, between and after."""
    (x,) = t.inputs
    with torch.no_grad():
        before = t.run(x)
    loss = t.run(x)
    with torch.inference_mode():
        between = t.run(x).item()
    loss.backward()
    assert before == between == loss
    return (loss,)


TRAINED: dict[str, tuple[Callable[[Trained], Results], int]] = {  # and what they leave to their own next call
    "gradients that accumulate": (accumulated, 4 * (LAYERS * WIDTH * (WIDTH + 1) + ROWS * WIDTH)),
    "losses summed": (losses_summed, 0),
    "losses apart": (losses_apart, 0),
    "autograd.grad": (asked_for, 0),
    "autograd.grad of some": (some_asked_for, 0),
    "clipped, and steps of an optimizer": (clipped, 0),
    "validation without gradients": (validated, NUMBER),
}


@pytest.mark.parametrize("name", TRAINED)
def test_steps_of_all_kinds(name: str) -> None:
    train, left_bytes = TRAINED[name]
    assert_as_without(Case(Net, "", leaf, steps=SEVERAL, handed_bytes=left_bytes, train=train))


def twice_through(t: Trained) -> Results:
    (x,) = t.inputs
    loss = t.run(x)
    loss.backward(retain_graph=True)
    once = [g.clone() for g in gradients(t)]
    loss.backward()
    assert all(torch.equal(g, 2 * o) for g, o in zip(gradients(t), once, strict=True))
    return gradients(t)


def test_a_graph_that_is_retained_goes_back_twice_with_the_same_bits() -> None:
    """What is recomputed is made anew each time, of values that the first time left as they were; what is
    retained is not counted in the budget.
    """
    assert_same_bits(Case(Net, "", leaf, train=twice_through))


# Hooks


class Hooked(Net):
    """``put`` hooks what is to be hooked; the list has what they saw."""

    def __init__(self, put: Callable[[Hooked], None]) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        put(self)


def on_parameters(net: Hooked) -> None:
    for p in net.parameters():
        p.register_hook(lambda grad: 0.5 * grad)
        p.register_post_accumulate_grad_hook(lambda p: net.seen.append(p.grad.sum()))  # type: ignore[union-attr]


def on_module(net: Hooked) -> None:
    net.layers[1].register_forward_hook(lambda _, __, out: out.exp())
    net.layers[2].register_forward_pre_hook(lambda _, args: (args[0].cos(),))


def on_the_step(net: Hooked) -> None:
    def note(_: nn.Module, __: Any, grads: tuple[Tensor, ...]) -> None:
        net.seen.append(grads[0].sum())

    net.register_full_backward_hook(note)


def seen(t: Trained) -> Results:
    t.run(*t.inputs).backward()
    assert isinstance(t.model, Hooked)
    found, t.model.seen = tuple(t.model.seen), []
    return found


@pytest.mark.parametrize("put", [on_parameters, on_module], ids=lambda put: put.__name__)
def test_hooks_see_and_change_what_they_did(put: Callable[[Hooked], None]) -> None:
    assert_as_without(Case(lambda: Hooked(put), "", train=seen))


def on_the_result(t: Trained) -> Results:
    """Of a tensor outside, that the compiled model takes, and of its loss."""
    found: list[Tensor] = []
    x = t.inputs[0] * 2
    x.register_hook(lambda grad: found.append(grad.sum()))
    loss = t.run(x)
    loss.register_hook(lambda grad: 3 * grad)
    loss.backward()
    return tuple(found)


def test_hooks_of_tensors_outside() -> None:
    made_bytes = 4 * ROWS * WIDTH + NUMBER
    assert_as_without(Case(Net, "", leaf, steps=SEVERAL, handed_bytes=made_bytes, train=on_the_result))


# Inside of the model


def frozen(x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = F.gelu(x.exp()).sin()
    return x * seen


class Straight(torch.autograd.Function):
    """A gradient that autograd would not find, from a tensor that is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x.round() + x.tanh(), sign

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - 0.5 * x.tanh().square())


def straight(x: Tensor) -> Tensor:
    rounded, sign = Straight.apply(3 * x)
    return rounded * sign


def hooked_inside(x: Tensor) -> Tensor:
    y = x.exp()
    y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return y.sin()


def in_a_region(x: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda x: F.gelu(x.exp()).tanh(), x, use_reentrant=False)
    return found


def detached(x: Tensor) -> Tensor:
    return x * F.softmax(x.detach().exp(), -1)


INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "no_grad": frozen,
    "detach": detached,
    "autograd.Function": straight,
    "a hook of a tensor": hooked_inside,
    "a region under checkpoint": in_a_region,
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_model_does_inside(name: str) -> None:
    assert_as_without(Case(lambda: Net(INSIDE[name]), "", leaf))
