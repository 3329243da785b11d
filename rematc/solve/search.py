"""Solve the relaxation, write the plan it says, look where that breaks the budget, refine there, again."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from rematc.problem import Problem
from rematc.solve.decode import decode
from rematc.solve.expand import Written, expand
from rematc.solve.improve import improve
from rematc.solve.merge import Merged
from rematc.solve.refine import Refined, build, refine

log = logging.getLogger(__name__)

ROUNDS = 100
FIRST_GAP = 0.2  # as long as more is refined
NODES = 400
SIMPLE_ROUNDS = 2  # before a draft is mended: often it is not needed
MEND = 1.0  # time to mend a draft, of what it took to find


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest plan found within the budget, if any, and a lower bound on every plan's cost.

    ``finished``: no limit cut the search short; without a plan there is then none in the given order.
    """

    best: Written | None
    bound_ns: int
    finished: bool


def search(problem: Problem, merged: Merged, refined: Refined, gap: float, deadline: float) -> Found:
    """The cheapest plan for ``merged`` within ``gap``, from what is ``refined`` on, until ``deadline``."""
    assert problem.budget_bytes is not None
    best: Written | None = None
    bound, asked = 0, gap if refined.is_complete else max(gap, FIRST_GAP)
    for n in range(ROUNDS):
        started = time.monotonic()
        if started > deadline:
            break
        f = build(problem, merged, refined)
        result = f.model.solve(gap=asked, time_limit_s=deadline - started, node_limit=NODES)
        if refined.bounds_all:
            bound = max(bound, f.floor_ns(result.bound))
        if result.values is None:
            return Found(best, bound, result.finished)
        written = expand(problem, merged, decode(f, result.values))
        log.debug("%d spans: at least %d ns, found %d ns", len(f.spans), bound, written.plan.cost_ns)
        goal, before, fits = (1 + gap) * bound, refined.size, written.plan.peak_bytes <= problem.budget_bytes
        if not fits:
            refine(problem, merged, refined, written)
            if n >= SIMPLE_ROUNDS:
                until = min(deadline, time.monotonic() + MEND * (time.monotonic() - started))
                written = improve(problem, merged, refined, written, goal, gap / 2, until) or written
        if written.plan.peak_bytes <= problem.budget_bytes:
            best = min((w for w in (best, written) if w is not None), key=lambda w: w.plan.cost_ns)
            if best.plan.cost_ns <= goal or (fits and asked <= gap / 2):
                return Found(best, bound, result.finished)
        if fits:
            asked = gap / 2
        elif refined.size == before:
            break
    return Found(best, bound, False)
