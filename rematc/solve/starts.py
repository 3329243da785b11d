"""Plans within the budget that need no MILP of the whole: where the search for cheaper ones begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve.chain import chained, cheapest, plans_of_chains
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.evict import evict
from rematc.solve.expand import Written, excesses, written_again
from rematc.solve.improve import Starts, mended
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.refine import Refined
from rematc.solve.reversal import reversal
from rematc.solve.spans import tightest
from rematc.solve.spare import spared

LIKE = 0.25  # of the time left, to evict, to mend what breaks the budget, and for what `once` finds
FEW = 10  # ops of a plan that are over the budget: it can be mended soon
NEARBY = 2  # sizes of what is decided anew of a plan that is known: where more has to be, it is no help
FINER = 2, 4  # parts of what counts as little
DEAR = 2.0  # forward passes: others are looked for
MOST = 3  # to start from
HOPELESS = 1.5  # times the cheapest plan known: not worth starting from


def first_plans(
    problem: Problem,
    merged: Merged,
    little: int,
    gap: float,
    deadline: Deadline,
    nearest: Written | None = None,
    like: Written | None = None,
    once: Callable[[Deadline], Written | None] = lambda deadline: None,
) -> Starts:
    """The cheapest plans within the budget that need no MILP of the whole, ``like`` among them.

    If all are dear, one like the chain's of the lowest peak or like ``nearest``, which break the budget, or
    those of finer merges. Only then are they `spared` what they have room for: one that was dear would not
    look so any more, and others may still be far cheaper.
    """
    assert problem.budget_bytes is not None
    plain, bound_ns = reversal(problem, merged, gap, deadline)
    if plain and plain.plan.cost_ns <= (1 + gap) * bound_ns:
        return Starts([plain], bound_ns)
    chains = plans_of_chains(problem, merged)
    of_chain, low = cheapest(chains), chains[-1].lowest() if chains else None
    greedy, others = [drop(problem, merged)], [like, plain, of_chain]
    if not of_chain and (merged.core.has_forward or not any((*greedy, *others))):
        greedy.append(evict(problem, merged, Deadline.after(LIKE * deadline.left())))

    def are_dear() -> bool:
        return _are_dear(problem, merged, (*greedy, *others))

    for over in (None if of_chain else _hardly_over(problem, low), nearest):
        if over and are_dear():
            others.append(_mended(problem, over, gap, deadline))
    finer = (little // part for part in FINER)  # what is saved as small can be too much, or too little
    while are_dear() and (small := next(finer, None)) is not None:
        others.append(chained(problem, merge(merged.full, small)))
    if are_dear():
        others.append(once(Deadline.after(LIKE * deadline.left())))
    if low and low.plan.peak_bytes <= problem.budget_bytes:
        others.append(low)  # a dear one before it is spared anything
    lean, lean_others = (_spared_each(problem, plans, deadline) for plans in (greedy, others))
    return Starts(_nearest([*lean_others, *lean]), bound_ns, min(lean, key=_cost, default=None))


def _spared_each(problem: Problem, plans: Iterable[Written | None], deadline: Deadline) -> list[Written]:
    """Those that there are."""
    return [spared(problem, each, Deadline.after(LIKE * deadline.left())) for each in plans if each]


def _nearest(found: Iterable[Written]) -> list[Written]:
    """The cheapest and those that cost little more, each plan once: the last of those that are the same."""
    apart = {(written.plan.saved, written.plan.backward): written for written in found}
    by_cost = sorted(apart.values(), key=_cost)
    return [written for written in by_cost if _cost(written) <= HOPELESS * _cost(by_cost[0])][:MOST]


def _are_dear(problem: Problem, merged: Merged, found: Iterable[Written | None]) -> bool:
    """All that were found, if any."""
    most_ns = DEAR * problem.forward_ns if merged.core.has_forward else math.inf
    return all(written is None or written.plan.cost_ns > most_ns for written in found)


def _hardly_over(problem: Problem, low: Written | None) -> Written | None:
    """``low``, if few of its ops are over the budget."""
    return low if low and len(list(excesses(problem, low))) <= FEW else None


def _mended(
    problem: Problem, over: Written, gap: float, deadline: Deadline, sizes: int | None = None
) -> Written | None:
    """A plan within the budget like ``over``, which may break it; None if none was found in time."""
    if over.plan.peak_bytes <= (problem.budget_bytes or 0):
        return over
    limit, refined = Deadline.after(LIKE * deadline.left()), Refined(tightest(over.merged.core))
    return mended(problem, over, refined, gap, limit, sizes)


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
    return _mended(problem, found[0], gap, deadline, NEARBY)


def _cost(written: Written) -> int:
    return written.plan.cost_ns
