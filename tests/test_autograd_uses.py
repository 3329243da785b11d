"""What people do around and inside of a compiled model with autograd: the same bits, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.cases import ROWS, SEVERAL, WIDTH, Case, Results, Trained, assert_as_without
from tests.nets import LAYERS, Net, Two, gradients, leaf

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]
NUMBER = 4  # its bytes


# Around the model: losses, backward passes, and what runs without gradients


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
    for loss in (t.run(x), t.run(x.cos())):  # both are there before the first goes back
        loss.backward()
    return gradients(t)


def asked_for(count: int, t: Trained) -> Results:
    (x,) = t.inputs
    found = torch.autograd.grad(t.run(x), [x, *t.model.parameters()][:count])
    assert x.grad is None and not gradients(t)  # it leaves nothing there
    return found


def clipped(t: Trained) -> Results:
    """Steps of an optimizer with a state, so that a wrong bit shows in all that follow."""
    assert isinstance(t.model, Net)
    t.run(*t.inputs).backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
    t.model.optimizer.step()
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


def encoded(mode: Callable[[], AbstractContextManager[Any]], t: Trained) -> Results:
    """An encoder that is not trained, before the model."""
    with mode():
        x = F.gelu(t.inputs[0] * 2).sin()
    if x.is_inference():
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            t.run(x)  # as in eager PyTorch
        x = x.clone()
    t.run(x).backward()
    return gradients(t)


def hooked_outside(t: Trained) -> Results:
    """A tensor that the model takes, and its loss."""
    found: list[Tensor] = []
    x = t.inputs[0] * 2
    x.register_hook(lambda grad: found.append(grad.sum()))
    loss = t.run(x)
    loss.register_hook(lambda grad: 3 * grad)
    loss.backward()
    return tuple(found)


GRADIENTS, INPUT = 4 * LAYERS * WIDTH * (WIDTH + 1), 4 * ROWS * WIDTH  # bytes
TRAINED: dict[str, tuple[Callable[[Trained], Results], int]] = {  # and the bytes that they hand to the model
    "gradients that accumulate": (accumulated, GRADIENTS + INPUT),
    "losses summed": (losses_summed, 0),
    "losses apart": (losses_apart, 0),
    "autograd.grad": (partial(asked_for, 1 + 2 * LAYERS), 0),
    "autograd.grad of some": (partial(asked_for, 2), 0),
    "clipped, and steps of an optimizer": (clipped, 0),
    "validation without gradients": (validated, NUMBER),
    "an encoder under no_grad": (partial(encoded, torch.no_grad), INPUT),
    "an encoder under inference_mode": (partial(encoded, torch.inference_mode), INPUT),
    "hooks of tensors outside": (hooked_outside, INPUT + 2 * NUMBER),
}


@pytest.mark.parametrize("name", TRAINED)
def test_steps_of_all_kinds(name: str) -> None:
    train, handed_bytes = TRAINED[name]
    assert_as_without(Case(Net, "gelu", leaf, steps=SEVERAL, handed_bytes=handed_bytes, train=train))


def test_two_losses_of_one_forward_pass_summed() -> None:
    assert_as_without(Case(Two, "gelu", leaf, lambda run, inputs: (sum(run(*inputs)),), SEVERAL))


# Inside of the model


def apart(mode: Callable[[], AbstractContextManager[Any]], x: Tensor) -> Tensor:
    """Autograd keeps both factors: of what inference mode made a clone."""
    with mode():
        seen = F.gelu(x.exp()).sin()
    return x * seen.clone()


class Straight(torch.autograd.Function):
    """A gradient that autograd would not find, from a tensor that is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x.round(), sign

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - 0.5 * x.tanh().square())


def hooked_inside(x: Tensor) -> Tensor:
    y = x.exp()
    y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return y.sin()


INSIDE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {  # and an op of it
    "no_grad": (partial(apart, torch.no_grad), "exp"),
    "inference_mode": (partial(apart, torch.inference_mode), "exp"),
    "detach": (lambda x: x * x.detach().exp().softmax(-1), "softmax"),
    "autograd.Function": (lambda x: torch.mul(*Straight.apply(3 * x)), "round"),
    "a hook of a tensor": (hooked_inside, "exp"),
    "a region under checkpoint": (lambda x: checkpoint(torch.exp, x, use_reentrant=False).sin(), "exp"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_model_does_inside(name: str) -> None:
    middle, op = INSIDE[name]
    assert_as_without(Case(lambda: Net(middle), op, leaf))
