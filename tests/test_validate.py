"""Every refusal of a plan that can't run, or lies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rematc.errors import PlanError
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged, simulate, validate
from tests.graphs import Builder
from tests.test_simulate import CHAIN, peak, save_all


def pinned() -> Problem:
    b = Builder()
    (r,) = b.op("rand", [b.input("x")], 8, pin="random")
    (m,) = b.op("copy", [r], 8, pin="mutates", needed="mutates an input")
    (dx,) = b.op("h", [r, m, b.tangent("dy")], 8, phase="backward")
    (dz,) = b.op("k", [dx], 8, phase="backward")
    return b.problem([], [dz])


@pytest.mark.parametrize(
    ("saved", "backward", "why"),
    [
        ((1,), (2, 3), "op 'h' reads 'copy.0', which is neither saved nor recomputed"),
        ((2,), (0, 2, 3), "op 'rand' may not run twice: random"),
        ((1,), (1, 2, 3), "op 'copy' must run in forward alone: mutates an input"),
        ((1, 2), (2,), "the plan's backward ops are not the graph's, each once"),
        ((1, 2), (2, 2, 3), "the plan's backward ops are not the graph's, each once"),
        ((1, 2), (3, 2), "op 'k' reads 'h.0', which is neither saved nor recomputed"),
        ((99,), (2, 3), "the plan names value 99, and the graph has 0 to 5"),
        ((1, 2), (2, -1), "the plan names op -1, and the graph has 0 to 3"),
        ((1, 2, 3), (2, 3), "the plan saves reads 'dy'"),
        ((1, 2, 4), (2, 3), "the plan saves reads 'h.0'"),
    ],
)
def test_what_cannot_run_is_refused(saved: tuple[int, ...], backward: tuple[int, ...], why: str) -> None:
    assert peak(pinned(), (1, 2), (2, 3)) == 24
    with pytest.raises(PlanError, match=why):
        simulate(pinned(), Plan(saved, backward))


def effects() -> Problem:
    """Backward ops: one reads a buffer, one draws, one writes the buffer, one reads it again, one is free."""
    b = Builder()
    buffer, dy, dz = b.input("buffer", 4), b.tangent("dy", 1), b.tangent("dz", 1)
    (before,) = b.op("before", [dy, buffer], 1, phase="backward")
    (noise,) = b.op("noise", [], 1, phase="backward", pin="random", needed="random")
    b.op("write", [buffer, dy], 1, phase="backward", pin="mutates", needed="mutates")
    (after,) = b.op("after", [buffer], 1, phase="backward")
    (free,) = b.op("free", [dz], 1, phase="backward")
    return b.problem([], [before, noise, after, free])


@pytest.mark.parametrize(
    ("backward", "why"),
    [
        ((4, 1, 0, 2, 3), None),
        ((0, 1, 4, 2, 3), None),
        ((0, 2, 1, 3, 4), "backward op 'write' before 'noise'"),
        ((1, 2, 0, 3, 4), "backward op 'write' before 'before'"),
        ((0, 1, 3, 2, 4), "backward op 'after' before 'write'"),
    ],
)
def test_effects_keep_their_order_and_reads_their_side_of_a_write(
    backward: tuple[int, ...], why: str | None
) -> None:
    if why is None:
        simulate(effects(), Plan((), backward))
    else:
        with pytest.raises(PlanError, match=why):
            simulate(effects(), Plan((), backward))


def test_a_gradient_must_be_at_hand_at_the_end() -> None:
    b = Builder()
    (a,) = b.op("f", [b.input("x")], 8)
    (dx,) = b.op("h", [b.tangent("dy")], 1, phase="backward")
    problem = b.problem([], [a, dx])
    assert peak(problem, (a,), (1,)) == peak(problem, (), (1, 0)) == 9
    with pytest.raises(PlanError, match="the backward pass returns reads"):
        simulate(problem, Plan((), (1,)))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"peak_bytes": 4}, "claims a peak of 4 bytes"),
        ({"cost_ns": 1}, "a cost of 1 ns"),
        ({"bound_ns": 1}, "lower bound 1 is above its cost 0"),
        ({"digest": "0" * 16}, "the plan is for problem 0000"),
    ],
)
def test_a_plan_that_lies_is_refused(changed: dict[str, int | str], why: str) -> None:
    plan = judged(CHAIN, save_all(CHAIN))
    validate(CHAIN, plan)
    with pytest.raises(PlanError, match=why):
        validate(CHAIN, replace(plan, **changed))  # type: ignore[arg-type]
