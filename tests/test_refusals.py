"""A budget that is refused leaves nothing behind: the next try, with a smaller batch, needs the memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

import rematc
from rematc.problem import Problem
from tests.graphs import chain
from tests.small import batch, eager, net

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_model_that_was_refused_can_be_let_go_of() -> None:
    model = net()
    gone = weakref.ref(model)
    run = torch.compile(model, backend=eager(1000))
    for _ in range(2):
        with pytest.raises(rematc.BudgetError) as refused:
            run(batch())
        assert refused.value.plan is not None
    del model, run, refused
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("ask", [lambda p: rematc.solve(p, budget_bytes=1), rematc.pareto])
def test_whoever_asked_for_what_is_refused_is_let_go_of_at_once(ask: Callable[[Problem], object]) -> None:
    """Not just once garbage is collected: plans for several graphs begin with a refusal, and a step waits."""

    def asked() -> weakref.ref[set[int]]:
        held = set[int]()  # stands for the batch of a step
        with suppress(rematc.BudgetError):
            ask(chain(16))
        return weakref.ref(held)

    asked()
    gc.collect()
    gc.disable()
    try:
        assert asked()() is None
    finally:
        gc.enable()
