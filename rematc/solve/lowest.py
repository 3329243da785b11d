"""The smallest budget that can be met: the MILP, with the peak in place of the time, and then `Narrowing`."""

from __future__ import annotations

from functools import partial

from rematc.problem import Problem
from rematc.solve.chain import plans_of_chains
from rematc.solve.choices import MANY
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode
from rematc.solve.drop import drop
from rematc.solve.evict import evict
from rematc.solve.expand import Written, expand
from rematc.solve.hold import held_longer
from rematc.solve.merge import Merged, unmerged
from rematc.solve.model import NODES
from rematc.solve.narrow import Narrowing
from rematc.solve.reduce import Core
from rematc.solve.refine import MANY_AT_ONCE, Refined, build, refine
from rematc.solve.search import ROUNDS
from rematc.solve.spans import loads, tightest

GAP = 0.01
SHARE = 0.4  # of the time, for the MILP
TRIES = 6
CHAINS = 2
ENOUGH = 0.05  # above the bound: then nothing else is tried
SHORT_S = 1.0  # to look for a lower plan where one is low enough
SLIGHTLY = 0.005  # lower is not worth a plan that makes all anew
SCRATCH_PAIRS = 2_000_000  # of stages and units: for more, what is made anew takes too long to write


def lowest(problem: Problem, merged: Merged, start: Written, deadline: Deadline) -> tuple[Written, int]:
    """The plan with the lowest peak found by ``deadline``, and a lower bound on the peak of every plan.

    ``start`` is any plan that is known. A plan within the problem's budget is low enough.
    """
    asked = problem.budget_bytes or 0
    first = Deadline.after(SHARE * deadline.left())
    best, bound = _by_milp(problem, merged, _chained(problem, merged, start), first)

    def is_low() -> bool:
        return best.plan.peak_bytes <= max(asked, _above(problem, bound, ENOUGH))

    can_narrow = merged.core.has_forward
    if can_narrow and len(merged.core.stages) * len(merged.core.units) <= SCRATCH_PAIRS:
        until = Deadline.after(SHORT_S) if is_low() else deadline
        held = held_longer(problem, merged, max(asked, bound), until)
        is_lower = _above(problem, held.plan.peak_bytes, SLIGHTLY) < best.plan.peak_bytes
        is_as_low = held.plan.peak_bytes == best.plan.peak_bytes  # it makes more anew, to be spared
        best = held if is_lower or is_as_low or held.plan.peak_bytes <= asked < best.plan.peak_bytes else best
    if not is_low() and can_narrow:
        narrowing = Narrowing(problem, unmerged(merged.full), best, bound)
        narrowing.run(asked, ENOUGH, deadline)
        best, bound = narrowing.best, narrowing.bound_bytes
    if not is_low():
        best = _dropped(problem, merged, best, deadline)
    return best, min(bound, best.plan.peak_bytes)


def _of_one_op(core: Core) -> int:
    """What the neediest op takes: a bound on every peak.

    0 where an op of a later stage makes what can't be made again: `loads` counts that from the beginning.
    """
    return max(loads(core)[0]) if core.has_forward else 0


def _by_milp(problem: Problem, merged: Merged, best: Written, deadline: Deadline) -> tuple[Written, int]:
    """A plan with a lower peak than ``best``, if the MILP finds one, and what it proves."""
    bound, asked, refined = _of_one_op(merged.core), problem.budget_bytes or 0, Refined(tightest(merged.core))
    high = best.plan.peak_bytes
    problem, gap = problem.with_budget(high), GAP / 4 * (1 - problem.base_bytes / max(1, high))
    for _ in range(ROUNDS):
        if deadline.left() <= 0:
            break
        f = build(problem, merged, refined, least_peak=True)
        result = f.model.solve(gap=gap, time_limit_s=deadline.left(), node_limit=NODES)
        if refined.bounds_all:
            bound = max(bound, f.floor_bytes(result.bound))
        if result.values is None:
            break
        written = expand(problem, merged, decode(f, result.values))
        best = min(best, written, key=_peak)
        target = _above(problem, max(bound, f.floor_bytes(result.bound)), GAP)
        grown = refine(problem.with_budget(target), merged, refined, written, at_once=MANY_AT_ONCE)
        if best.plan.peak_bytes <= max(target, asked) or not grown:
            break
    return best, bound


def _chained(problem: Problem, merged: Merged, start: Written) -> Written:
    """The plan with the lowest peak of those for a chain, or ``start``."""
    best = start
    for _ in range(CHAINS):  # each with bytes told apart more finely
        plans = plans_of_chains(problem.with_budget(best.plan.peak_bytes), merged)[-1:]
        found = [written for each in plans if (written := each.lowest())]
        best = min([best, *found], key=_peak)
        if not found or plans[0].n > MANY:  # it takes long
            break
    return best


def _dropped(problem: Problem, merged: Merged, start: Written, deadline: Deadline) -> Written:
    """The plan with the lowest peak that needs no MILP: by dropping, or evicting."""
    best = start
    for by in (drop, partial(evict, deadline=deadline)):
        low = problem.base_bytes
        for _ in range(TRIES):
            middle = (low + best.plan.peak_bytes) // 2
            written = by(problem.with_budget(middle), merged)
            if written is None:
                low = middle
            else:
                best = written
    return best


def _above(problem: Problem, peak_bytes: int, share: float) -> int:
    """``share`` more than ``peak_bytes``, of what is not resident."""
    return peak_bytes + int(share * max(0, peak_bytes - problem.base_bytes))


def _peak(written: Written) -> int:
    return written.plan.peak_bytes
