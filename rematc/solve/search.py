"""Solve the relaxation, write the plan it says, look where that breaks the budget, refine there, again."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode
from rematc.solve.expand import Written, expand
from rematc.solve.improve import Improver, mended
from rematc.solve.merge import Merged
from rematc.solve.refine import AT_ONCE, Refined, build, refine
from rematc.solve.spans import tightest
from rematc.solve.tail import Tail, find_tail

log = logging.getLogger(__name__)

ROUNDS = 100
MARGINS, LITTLE = 4, 0.02  # how often, and up to what share of the budget, a margin is tried
FIRST_GAP = 0.1  # as long as more is refined: halved from round to round
ALMOST = 0.9  # of the gap: rounding takes the rest
NODES = 400
ROOM = 2000  # stages told apart in a round, times units: with more the next one takes long
SHARE = 0.5  # of the time left, for one round
MENDING = 0.1  # of the time left, to mend what a round found
FAR, TRY = 1.25, 0.2  # the first plan needs so many budgets: rounds are that short, and the tail may help
FEW_LABELS, LABELS = 30_000, 500_000  # to see whether the tail helps, and to go as far as it can
GAIN = 0.01  # of the linear relaxation, so that it is worth it
SIMPLE_ROUNDS = 1  # before anything else is tried than to refine: often that is not needed
HOPELESS = 1.25  # times the bound, where the MILP was cut short
STEPS = 4  # of the improver after the first round, then twice as many after each


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest plan found within the budget, if any, and a lower bound on every plan's cost.

    ``finished``: no limit cut the search short; without a plan there is then none in the given order.
    """

    best: Written | None
    bound_ns: int
    finished: bool


def search(
    problem: Problem,
    merged: Merged,
    refined: Refined,
    gap: float,
    deadline: Deadline,
    improver: Improver | None = None,
) -> Found:
    """The cheapest plan for ``merged`` within ``gap``, from what is ``refined`` on, until ``deadline``."""
    assert problem.budget_bytes is not None
    best: Written | None = None
    at_once = max(1, min(AT_ONCE, ROOM // max(1, len(merged.core.units))))
    final = ALMOST * gap
    bound, asked = 0, final if refined.is_complete else max(final, FIRST_GAP)
    is_far = False
    for n in range(ROUNDS):
        if deadline.left() <= 0:
            break
        f = build(problem, merged, refined)
        is_simple, is_trial = n < SIMPLE_ROUNDS, n == SIMPLE_ROUNDS and is_far
        share = 1.0 if asked <= final else TRY if is_trial or refined.tail else SHARE
        result = f.model.solve(gap=asked, time_limit_s=share * deadline.left(), node_limit=NODES)
        if refined.bounds_all:
            bound = max(bound, f.floor_ns(result.bound))
        goal = (1 + gap) * bound
        if result.values is None and is_trial and not result.finished:
            is_far = False  # it was too short for that
            continue
        if result.values is None:
            return Found(best, bound, result.finished)
        written = expand(problem, merged, decode(f, result.values))
        log.debug("%d spans: at least %d ns, found %d ns", len(f.spans), bound, written.plan.cost_ns)
        fits = written.plan.peak_bytes <= problem.budget_bytes
        near = written if fits else None
        is_hopeless = not result.finished and written.plan.cost_ns > HOPELESS * bound
        if not (fits or is_simple or is_hopeless):
            near = _near(problem, merged, refined, written, asked, deadline)
        if near:
            best = min(best or near, near, key=lambda w: w.plan.cost_ns)
        if improver and not is_simple and not _reached(best, goal):
            improver.begin(best, bound)
            bound = max(bound, improver.bound_ns)
            goal = (1 + gap) * bound
            improver.run(goal, gap / 2, deadline, STEPS << n)
            best = improver.best or best
        if _reached(best, goal) or (fits and asked <= final):  # the relaxation has nothing more to say
            return Found(best, bound, result.finished)
        if is_trial and (tail := _tail(problem, merged, deadline)):
            refined, asked = Refined(tightest(merged.core), tail=tail), FIRST_GAP / 4
            if improver:
                improver.tail = tail.within(problem.budget_bytes)
            continue
        if is_hopeless and not is_trial:  # refined further it only takes longer
            break
        is_far = is_far or (is_simple and _needed(problem, written) > FAR)
        if fits:
            asked = final
        elif refine(problem, merged, refined, written, at_once=at_once):
            asked = max(final, asked / 2)
        elif asked > final:  # all is told apart
            asked = final
        else:
            break
    return Found(best, bound, False)


def _tail(problem: Problem, merged: Merged, deadline: Deadline) -> Tail | None:
    """The tail, if with it the linear relaxation says more than without."""
    assert problem.budget_bytes is not None

    def relaxed_ns(tail: Tail | None) -> int:
        f = build(problem, merged, Refined(tightest(merged.core), tail=tail))
        return f.floor_ns(f.model.relaxed().solve(gap=0.0, time_limit_s=deadline.left()).bound)

    tail = find_tail(merged, problem.budget_bytes, FEW_LABELS, deadline)
    if tail and relaxed_ns(tail) > (1 + GAIN) * relaxed_ns(None):
        tail = find_tail(merged, problem.budget_bytes, LABELS, deadline) or tail
        log.debug("tail from stage %d: %d ways", tail.start, len(tail.ways))
        return tail
    return None


def _needed(problem: Problem, written: Written) -> float:
    """The peak of ``written`` in budgets, both above what is resident."""
    assert problem.budget_bytes is not None
    return (written.plan.peak_bytes - problem.base_bytes) / max(1, problem.budget_bytes - problem.base_bytes)


def _reached(best: Written | None, goal_ns: float) -> bool:
    return best is not None and best.plan.cost_ns <= goal_ns


def _near(
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
    """A plan for a budget less what the last one broke it by, as long as that helps."""
    assert problem.budget_bytes is not None
    asked = problem.budget_bytes
    for _ in range(MARGINS):
        if deadline.left() <= 0:
            break
        asked -= excess * 5 // 4  # a little more: what is made again then needs room elsewhere
        f = build(problem.with_budget(asked), merged, refined.within(asked))
        result = f.model.solve(gap=gap, time_limit_s=deadline.left(), node_limit=NODES)
        if result.values is None:
            break
        written = expand(problem, merged, decode(f, result.values))
        before, excess = excess, written.plan.peak_bytes - problem.budget_bytes
        if excess <= 0:
            return written
        if excess > before / 2:
            break
    return None
