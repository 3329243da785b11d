"""A lower bound for a chain of segments that have few blocks, by dynamic programming over its prefixes.

A *prefix* is segments 0 to s of the chain. Those after it can only ask it for the block that leaves it: then
that is made, out of what the prefix holds. Between two times that it is asked, some moment is the one at
which it holds least. Look at it then alone, and take all that it runs between two such moments for one step,
in which no memory is counted: whatever a plan does, the runs of the prefix take at least

    back[b]         holding b to the end, to go back over it
    made[b, c]      holding b, to make what leaves it once, then holding c
    again[b, c]     the same, and then to go back

with bytes in levels, rounded down. If it is asked n > 1 times, holding b, then c, ..., and d at last, they
take at least

    made[b, c] + what follows, from c on, for itself
    again[b, d] + (n - 1) * the unit that makes what leaves: all in one step, it would run once

whichever is more, and so does what follows.

A prefix's own runs are counted from one of its own least moments to the next, so nothing is counted twice.
From the tables of a prefix follow those of the next one (`back`): in the stages of the segment in between,
all is looked at that its own units can do, in any order, and all times to ask. So no plan with the backward
ops in this order costs less than the least back[b] of the whole chain, in whatever order it recomputes, and
however often. After rotor's recursion (Beaumont et al. 2019), turned around to be a bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from rematc.problem import Problem
from rematc.solve.back import Back, back_over
from rematc.solve.clock import spend
from rematc.solve.cutting import single_chain_of
from rematc.solve.deadline import Deadline
from rematc.solve.expand import Draft, Written, excesses, expand, restated
from rematc.solve.improve import Starts, mended
from rematc.solve.merge import Merged, merge
from rematc.solve.part import Numbers, Part
from rematc.solve.refine import Refined
from rematc.solve.segments import Chain
from rematc.solve.spans import tightest
from rematc.solve.unfold import drafts

LEVELS = 128, 64  # of bytes that are told apart
FINEST = 64  # parts of a block that a level may be
LEFT_OUT, LOST = 0.5, 0.03  # so much may not count of the room, and of all bytes, as they are rounded down
COARSER = 5, 20  # times the room: what counts as small is a part of that
WORK = 5e9  # entries of tables to look at, all together
SECOND = 0.004  # of the room may be left out if that saves a second
SPEED, PLAN_SPEED = 9e8, 1.2e9  # of them a second, at the least: for a bound, and for a plan
KEPT = 4e7  # entries of tables: 320 MB
EXACT = 1 << 24  # whole numbers up to it are exact as float32, and costs are told as such
FORWARDS = 8  # times what all units take: such a cost is told as `EXACT`, and a larger one, too
ODD = 100  # sizes of blocks that levels are made to fit
HOPELESS = 1.25  # times the bound: such a plan is not worth to start from
LIKE = 0.25  # of the time left, to mend plans
FEW = 10  # ops of a plan that are over the budget: it can be mended soon, or not at all


class Prefixes:
    """The segments of a chain, and what they cost from the first to the last.

    ``for_plan``: what a plan costs in which a prefix is asked once, not a bound.
    """

    def __init__(
        self,
        merged: Merged,
        chain: Chain,
        budget_bytes: int,
        n_levels: int = LEVELS[0],
        *,
        for_plan: bool = False,
    ) -> None:
        core = chain.core
        self.merged, self.core, self.chain, self.ways = merged, core, chain, list[Back]()
        self.is_known = False
        room = budget_bytes - min(stage.before_bytes for stage in core.stages)
        size = _level_bytes(core.block_bytes, room, n_levels)
        every_ns = sum(u.cost_ns for u in core.units)
        self.quantum = -(-FORWARDS * every_ns // EXACT) or 1  # nanoseconds
        numbers = Numbers(budget_bytes, size, 1 + max(0, room) // size, self.quantum, for_plan)
        self.parts = [Part(merged, chain, s, numbers) for s in range(len(chain.segments))]
        self.rounding = sum(b % size for b in core.block_bytes) / max(1, sum(core.block_bytes))
        self.free = (merged.small_bytes + chain.kept_bytes) / max(1, room)
        self.looks, self.entries = map(sum, zip(*(part.work() for part in self.parts), strict=True))
        self.speed = PLAN_SPEED if for_plan else SPEED

    @property
    def work_s(self) -> float:
        """To look at all."""
        return self.looks / self.speed

    @property
    def are_few(self) -> bool:
        """Can all be looked at?"""
        return self.looks <= WORK and self.entries <= KEPT

    @property
    def are_close(self) -> bool:
        """Do they say enough for a bound?"""
        return self.free <= LEFT_OUT and self.rounding <= LOST

    def least_ns(self, deadline: Deadline) -> int:
        """No plan costs less, or that of `drafts` costs it; 0 if there is no time to find out."""
        costs = None
        if deadline.left() < self.work_s:
            return 0
        for part in self.parts:
            if deadline.left() < 0:
                return 0
            self.ways.append(back_over(part, costs))
            spend(part.work()[0] / self.speed)
            costs = self.ways[-1].costs()
        assert costs is not None
        self.is_known = bool(np.isfinite(costs.back.min()))
        first_ns = sum(self.core.units[u].cost_ns for u in self.core.extra)  # those runs are for nothing
        return max(0, int(min(costs.back.min(), EXACT)) * self.quantum - first_ns)

    def drafts(self) -> Iterator[Draft]:
        """What plans would do that cost little more than `least_ns` said; none if it had no time for that."""
        if self.is_known:
            yield from drafts(self.core, self.chain, self.ways)


def prefixes_of(
    merged: Merged, budget_bytes: int, limit_s: float = math.inf, *, coarser: bool = True
) -> Prefixes | None:
    """Those that say most of plans within ``budget_bytes``, with more or fewer levels: of ``merged`` or, if
    ``coarser``, with more blocks that count as small. None if it is no chain, or they are too many.
    """
    cores = with_more_small(merged, budget_bytes) if coarser else [merged]
    chains = ((core, single_chain_of(core.core)) for core in cores)
    found = (Prefixes(core, chain, budget_bytes, n) for core, chain in chains if chain for n in LEVELS)
    possible = (p for p in found if p.are_few and p.are_close and p.work_s <= limit_s)
    return min(possible, key=lambda p: p.free + p.rounding + SECOND * p.work_s, default=None)


def with_more_small(merged: Merged, budget_bytes: int) -> Iterator[Merged]:
    """``merged``, and the same with more blocks that count as small, if there are any."""
    yield merged
    for most in COARSER:
        coarser = merge(merged.full, most * (budget_bytes - merged.core.base_bytes))
        if coarser.small_bytes > merged.small_bytes:
            yield coarser


def from_prefixes(
    problem: Problem, merged: Merged, gap: float, deadline: Deadline, *, coarser: bool = True
) -> Starts | None:
    """The bound, and plans within the budget that are like those that it is of, if there are any.

    None if there are no `prefixes_of` ``merged`` for which there is time.
    """
    assert problem.budget_bytes is not None
    prefixes = prefixes_of(merged, problem.budget_bytes, deadline.left(), coarser=coarser)
    if prefixes is None:
        return None
    bound_ns, plans = prefixes.least_ns(deadline), list[Written]()
    limit = Deadline.after(LIKE * deadline.left())
    for draft in prefixes.drafts():
        if limit.left() < 0:
            break
        written = restated(problem, merged, expand(problem, prefixes.merged, draft))
        if written.plan.cost_ns > HOPELESS * bound_ns:
            continue
        over = len(list(excesses(problem, written)))
        found = None if over else written
        if 0 < over <= FEW:
            refined = Refined(tightest(merged.core))
            found = mended(problem, written, refined, gap / 2, limit, sizes=1)
        plans += [found] if found else []
    return Starts(plans, bound_ns)


def _level_bytes(sizes: Iterable[int], room: int, n_levels: int) -> int:
    """Bytes of a level: of the parts of blocks that are not too small, what fits most blocks best."""
    least = max(1, -(-room // n_levels))
    known = dict(Counter(size for size in sizes if size >= least).most_common(ODD))
    parts = {size // n for size in known for n in range(1, min(FINEST, size // least) + 1)}

    def lost(part: int) -> int:
        return sum(many * (size % part) for size, many in known.items())

    return min(parts, key=lambda part: (lost(part), -part), default=least)
