"""Hooks of parameters, layers and models, put where people put them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rematc
from tests.cases import SEVERAL, Case, Results, Trained, assert_as_without
from tests.nets import LAYERS, Net, leaf

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]


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
