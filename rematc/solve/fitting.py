"""A plan that fits, near one that breaks the budget by little."""

from __future__ import annotations

from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode
from rematc.solve.expand import Written, expand
from rematc.solve.improve import mended
from rematc.solve.merge import Merged
from rematc.solve.model import NODES
from rematc.solve.nearby import is_large, nearby
from rematc.solve.refine import Refined, build
from rematc.solve.tighten import tighten

MARGINS, LITTLE = 4, 0.02  # how often, and up to what share of the budget, a margin is tried
MENDING = 0.1  # of the time left, to mend what a round found


def fitting(
    problem: Problem, merged: Merged, refined: Refined, written: Written, gap: float, deadline: Deadline
) -> Written | None:
    """A plan that fits, found near ``written``, which breaks the budget by little."""
    assert problem.budget_bytes is not None
    excess = written.plan.peak_bytes - problem.budget_bytes
    if excess > LITTLE * problem.budget_bytes:
        return None
    found = _with_margin(problem, merged, refined, excess, gap, deadline)
    return found or mended(problem, written, refined, gap / 2, Deadline.after(MENDING * deadline.left()))


def _with_margin(
    problem: Problem, merged: Merged, refined: Refined, excess: int, gap: float, deadline: Deadline
) -> Written | None:
    """A plan for a budget less what the last one broke it by, as long as that helps.

    Where small blocks alone can have broken it, one for the same budget with those counted.
    """
    assert problem.budget_bytes is not None
    asked, counted, cuts = problem.budget_bytes - excess * 5 // 4, merged, {**refined.cuts}
    if excess <= merged.small_bytes:
        asked, counted = problem.budget_bytes, merged.counted(at_most=True)
    for _ in range(MARGINS):
        if deadline.left() <= 0:
            break
        f = build(problem.with_budget(asked), counted, refined.within(asked))
        relaxed = tighten(f, cuts, deadline)
        if is_large(f):
            result = nearby(f, relaxed, gap, deadline, NODES)
        else:
            result = f.model.solve(gap=gap, time_limit_s=deadline.left(), node_limit=NODES)
        if result.values is None:
            break
        written = expand(problem, merged, decode(f, result.values))
        before, excess = excess, written.plan.peak_bytes - problem.budget_bytes
        if excess <= 0:
            return written
        if excess > before / 2:
            break
        asked -= excess * 5 // 4  # a little more: what is made again then needs room elsewhere
    return None
