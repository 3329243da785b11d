"""Plans within the budget that need no MILP of the whole: where the search for cheaper ones begins."""

from __future__ import annotations

from collections.abc import Iterable

from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve.chain import chain_plans, chained
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.evict import evict
from rematc.solve.expand import Written, excesses, written_again
from rematc.solve.improve import Starts, mended
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.refine import Refined
from rematc.solve.reversal import reversal
from rematc.solve.spans import tightest

LIKE = 0.25  # of the time left, to evict, and to mend what breaks the budget
FEW = 10  # ops of a plan that are over the budget: it can be mended soon
NEARBY = 2  # sizes of what is decided anew of a plan that is known: where more has to be, it is no help
FINER = 2, 4  # parts of what counts as little
DEAR = 2.0  # forward passes: others are looked for
HOPELESS = 1.5  # times the cheapest plan known: not worth starting from


def first_plans(
    problem: Problem,
    merged: Merged,
    little: int,
    gap: float,
    deadline: Deadline,
    nearest: Written | None = None,
    like: Written | None = None,
) -> Starts:
    """The plans within the budget that need no MILP of the whole, and ``like``; if there are none, one like
    ``nearest``, which breaks it, or some of finer merges.
    """
    assert problem.budget_bytes is not None
    plain, bound_ns = reversal(problem, merged, gap, deadline)
    if plain and plain.plan.cost_ns <= (1 + gap) * bound_ns:
        return Starts([plain], bound_ns)
    greedy = drop(problem, merged)
    found = [like, plain, greedy, _chained(problem, merged, gap, deadline)]
    if not found[-1] and (merged.core.has_forward or not any(found)):
        found.append(evict(problem, merged, Deadline.after(LIKE * deadline.left())))
        greedy = min(filter(None, (greedy, found[-1])), key=lambda w: w.plan.cost_ns, default=None)
    if nearest and _are_dear(problem, found):
        limit = Deadline.after(LIKE * deadline.left())
        found.append(mended(problem, nearest, Refined(tightest(merged.core)), gap, limit))
    finer = (little // part for part in FINER)  # what is saved as small can be too much, or too little
    while _are_dear(problem, found) and (small := next(finer, None)) is not None:
        found.append(chained(problem, merge(merged.full, small)))
    costs = [written.plan.cost_ns for written in found if written]
    near = [written for written in found if written and written.plan.cost_ns <= HOPELESS * min(costs)]
    return Starts(near, bound_ns, greedy)


def _are_dear(problem: Problem, found: Iterable[Written | None]) -> bool:
    """All that were found, if any."""
    return all(written is None or written.plan.cost_ns > DEAR * problem.forward_ns for written in found)


def _chained(problem: Problem, merged: Merged, gap: float, deadline: Deadline) -> Written | None:
    """The cheapest plan of a chain; if it has none, one like that of the lowest peak, if little is over."""
    found = chained(problem, merged)
    plans = None if found else chain_plans(problem, merged)
    if plans is None:
        return found
    low, limit = plans.lowest(), Deadline.after(LIKE * deadline.left())
    over = low and len(list(excesses(problem, low)))
    if not low or not over:
        return low
    return mended(problem, low, Refined(tightest(merged.core)), gap, limit) if over <= FEW else None


def like_known(
    problem: Problem, merged: Merged, known: Plan, gap: float, deadline: Deadline
) -> Written | None:
    """The plan that is ``known``, for a core for which it keeps to the budget, or one near it that does."""
    assert problem.budget_bytes is not None
    cores = merged, merge(merged.full), unmerged(merged.full)
    found = [written for core in cores if (written := written_again(problem, core, known))]
    fitting = (written for written in found if written.plan.peak_bytes <= problem.budget_bytes)
    if (fits := next(fitting, None)) or not found:
        return fits
    limit, refined = Deadline.after(LIKE * deadline.left()), Refined(tightest(found[0].merged.core))
    return mended(problem, found[0], refined, gap, limit, NEARBY)
