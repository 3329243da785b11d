"""Backward passes that keep their graph, and gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from tests.cases import WIDTH, Case, Results, Trained, assert_same_bits, under_the_smallest_budget
from tests.nets import Net, Two, gradients, leaf
from tests.test_limits import DOCS, NO_DOUBLE, WRITTEN_OVER

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]
MORE_THAN_PLANNED = "may need more memory than planned"


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
