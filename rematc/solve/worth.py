"""Is it worth it to tell the end of the backward pass exactly? It is where the linear relaxation gains."""

from __future__ import annotations

import logging
from dataclasses import replace

from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.merge import Merged
from rematc.solve.refine import Refined, build
from rematc.solve.tail import Tail, find_tail
from rematc.solve.tighten import tighten

log = logging.getLogger(__name__)

LABELS = (30_000, 0.002), (500_000, 0.01)  # of the tail, and the gain in the relaxation that they are worth


def worthwhile_tail(
    problem: Problem, merged: Merged, refined: Refined, relaxed_ns: int, deadline: Deadline
) -> Tail | None:
    """The tail, if with it the linear relaxation says more than ``relaxed_ns``, what it says without."""
    assert problem.budget_bytes is not None
    found = None
    for most, gain in LABELS:
        tail = find_tail(merged, problem.budget_bytes, most, deadline)
        if tail is None:
            break
        f = build(problem, merged, replace(refined, tail=tail))
        told_ns = f.floor_ns(tighten(f, {**refined.cuts}, deadline).bound)
        if told_ns <= (1 + gain) * relaxed_ns:
            break
        log.debug("tail from stage %d: %d ways", tail.start, len(tail.ways))
        found = tail
    return found
