"""What people do around a compiled model with autograd: gradients to the bit, and the budget kept."""

from __future__ import annotations

import gc
import logging
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

import rematc
from tests.cases import (
    ROWS,
    SEVERAL,
    WIDTH,
    Case,
    Results,
    Trained,
    assert_as_without,
    assert_same_bits,
    under_the_smallest_budget,
)
from tests.test_limits import DOCS, NO_DOUBLE, WRITTEN_OVER

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]
LAYERS, NUMBER = 2, 4  # the bytes of a number
MORE_THAN_PLANNED = "may need more memory than planned"


class Net(nn.Module):
    """Layers with a ``middle`` between them, a loss in float, and an optimizer."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.middle = middle
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, eps=1e-3)  # 1e-8 is 0 in float16

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.middle(F.gelu(layer(x))).sin()
        return x.float().square().mean()


def leaf() -> Results:
    return (torch.randn(ROWS, WIDTH).requires_grad_(),)


def gradients(t: Trained) -> Results:
    return tuple(p.grad for p in t.model.parameters() if p.grad is not None)


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


class Two(Net):
    """Two losses of one forward pass."""

    def forward(self, x: Tensor) -> Results:  # type: ignore[override]
        return super().forward(x), self.layers[0](x).cos().mean()


def test_two_losses_of_one_forward_pass_summed() -> None:
    assert_as_without(Case(Two, "gelu", leaf, lambda run, inputs: (sum(run(*inputs)),), SEVERAL))


def again_and_again(t: Trained) -> Results:
    """Twice from the first loss, then from the second: each time what is recomputed is made anew."""
    first, second = t.run(*t.inputs)
    first.backward(retain_graph=True)
    once = [g.clone() for g in gradients(t)]
    first.backward(retain_graph=True)
    assert all(torch.equal(g, 2 * o) for g, o in zip(gradients(t), once, strict=True))
    second.backward()
    return (*once, *gradients(t))


def differentiated_twice(t: Trained) -> Results:
    """That is refused, and training goes on."""
    (x,) = t.inputs
    (first,) = torch.autograd.grad(t.run(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=NO_DOUBLE):
        first.square().sum().backward()
    t.run(x).backward()
    return (first, *gradients(t))


@pytest.mark.parametrize(("make", "train"), [(Two, again_and_again), (Net, differentiated_twice)])
def test_a_graph_that_is_retained(make: type[Net], train: Callable[[Trained], Results]) -> None:
    case = Case(make, "gelu", leaf, train=train)  # what is retained is not counted in the budget
    assert_same_bits(case, *under_the_smallest_budget(case))


class Wide(nn.Module):
    """Backward's first kernel has room where the result of the layer was, if it may write there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def wide(inner: Any, retain: bool | None) -> tuple[Trained, rematc.Backend]:
    """After a step; ``retain``: its backward pass keeps the graph, and runs once more if it may."""

    def train(t: Trained) -> Results:
        loss = t.run(*t.inputs)
        loss.backward(retain_graph=bool(retain))
        once = gradients(t)[0].clone()
        if retain:
            loss.backward()
            assert torch.equal(gradients(t)[0], 2 * once)
        return (once,)

    backend = rematc.backend("1GB", inner=inner, costs="roofline")
    case = Case(Wide, "", lambda: (torch.randn(4096, WIDTH),), train=train, steps=1)
    return Trained(case, backend), backend


# Torch compiles one backward pass, which may write into what was saved if the first that runs is plain.
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_to_retain_a_graph_after_a_plain_step_is_refused_and_training_goes_on(inner: Any) -> None:
    assert WRITTEN_OVER in DOCS
    t, _ = wide(inner, retain=False)
    with pytest.raises(RuntimeError, match=WRITTEN_OVER):
        t.run(*t.inputs).backward(retain_graph=True)
    t.clear()
    assert torch.equal(t.step()[0], t.states[0][0])


# Inductor's cache has the code of the plain step: a second backward pass through it was wrong.
def test_under_inductor_a_graph_that_is_retained_goes_back_twice_and_what_it_takes_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, _ = wide("inductor", retain=False)
    assert MORE_THAN_PLANNED not in caplog.text
    retained, _ = wide("inductor", retain=True)
    torch.testing.assert_close(plain.states[0][0], retained.states[0][0])
    assert MORE_THAN_PLANNED in caplog.text


def test_a_plan_counts_on_it_that_nothing_saved_is_written_over_where_torch_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, written = wide("inductor", retain=False)
    with torch._functorch.config.patch(donated_buffer=False):
        t, kept = wide("inductor", retain=False)
        measured = kept.resident_bytes + t.peak_bytes()
        assert measured <= kept.plans[0].peak_bytes
        wide("inductor", retain=True)
    assert written.plans[0].peak_bytes < measured
    assert MORE_THAN_PLANNED not in caplog.text


# Hooks


class Hooked(Net):
    """``put`` hooks what is to be hooked, and says how often in a step what the list has is seen."""

    def __init__(self, put: Callable[[Hooked], int]) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.times = put(self)

    def note(self, grad: Tensor) -> None:
        self.seen.append(grad.sum())


def on_parameters(net: Hooked) -> int:
    for p in net.parameters():
        p.register_hook(lambda grad: 0.5 * grad)
        p.register_post_accumulate_grad_hook(lambda p: net.note(p.grad))  # type: ignore[arg-type]
    return 2 * LAYERS


def on_modules(net: Hooked) -> int:
    net.layers[0].register_forward_hook(lambda _, __, out: out.exp())
    net.layers[1].register_forward_pre_hook(lambda _, args: (args[0].cos(),))
    return 0


def on_the_model(net: Hooked) -> int:
    net.register_full_backward_pre_hook(lambda _, grads: (2 * grads[0],))  # type: ignore[index]
    net.register_full_backward_hook(lambda _, grads, __: net.note(grads[0]))  # type: ignore[index]
    return 1


def on_a_layer(net: Hooked) -> int:
    net.layers[1].register_full_backward_hook(lambda _, grads, __: (0.5 * grads[0],))  # type: ignore[index]
    return 0


def seen(t: Trained) -> Results:
    t.run(*t.inputs).backward()
    assert isinstance(t.model, Hooked)
    found, t.model.seen = tuple(t.model.seen), []
    assert len(found) == t.model.times
    return found


@pytest.mark.parametrize("put", [on_parameters, on_modules, on_the_model], ids=lambda put: put.__name__)
def test_hooks_see_and_change_what_they_did(put: Callable[[Hooked], int]) -> None:
    assert_as_without(Case(lambda: Hooked(put), "gelu", leaf, steps=SEVERAL, train=seen))


class Unrolled(Hooked):
    """Torch resumes after a layer that it can't compile, but not in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = second(F.gelu(first(x)).sin().exp())
        return F.gelu(x).sin().square().mean()


def test_a_backward_hook_of_a_layer_cuts_the_graph_and_the_parts_share_the_budget() -> None:
    assert_as_without(Case(lambda: Unrolled(on_a_layer), "gelu", leaf, steps=SEVERAL, train=seen))


def test_where_a_backward_hook_of_a_layer_keeps_all_from_being_compiled_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = rematc.backend("1MB", inner="eager")
    Trained(Case(lambda: Hooked(on_a_layer), "", leaf, train=seen), backend)
    plans = len(backend.plans)
    with caplog.at_level(logging.WARNING, "rematc"):
        del backend
        torch._dynamo.reset()
        gc.collect()
    assert ("nothing was compiled by rematc.backend" in caplog.text) is (plans == 0)


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
