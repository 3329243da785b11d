"""A plan without a MILP: keep everything, then drop what is cheapest to make again, until it fits.

Between two uses a block is kept: a *gap*. Where memory is over the budget most, gaps are dropped: first
those that cost the least time for the bytes they free in all stages that are over. A block's unit then
runs again at the gap's end, and what that reads has to be there: kept up to then, which makes new gaps,
to be dropped in turn, or made again with it, whichever scores better. XLA's rematerialization and DTR
(Kirisame et al. 2021) choose by much the same score.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from rematc.problem import Problem
from rematc.solve.clock import spend
from rematc.solve.expand import Draft, Written, excesses, expand
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core

STAGE_S, CHOICE_S = 3e-7, 5e-6  # of work
TRIES = 20

Gap = tuple[int, int, int]  # a block, the stage of one use (-1: in forward), that of the next


class Choice(NamedTuple):
    """A gap to drop, the units that then run at its end, and what that costs for each byte that it frees."""

    ns_per_byte: float
    gap: Gap
    units: tuple[int, ...]


def drop(problem: Problem, merged: Merged) -> Written | None:
    """A plan within the budget, or None.

    What runs again needs memory too: a stage where that turns out to break the budget gets so much less.
    """
    assert problem.budget_bytes is not None
    backward = _Backward(merged.core)
    for _ in range(TRIES):
        if not backward.fit(problem.budget_bytes):
            return None
        written = expand(problem, merged, backward.draft())
        if written.plan.peak_bytes <= problem.budget_bytes:
            return written
        over: dict[int, int] = {}
        for _, t, excess in excesses(problem, written):
            over[t or 0] = max(excess, over.get(t or 0, 0))  # forward ends where stage 0 begins
        for t, excess in over.items():
            backward.own_bytes[t] += excess
    return None


class _Backward:
    """The uses of each block, and which of them find it made anew rather than kept."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.uses = [[core.born[u]] for u in core.maker]
        self.made = [{core.born[u]} for u in core.maker]
        self.runs: list[set[int]] = [set() for _ in core.stages]
        self.reads = [frozenset(stage.reads) for stage in core.stages]
        size = core.block_bytes
        self.own_bytes = [s.op_bytes + sum(size[b] for b in s.reads) for s in core.stages]
        self.change = [0] * (len(core.stages) + 1)  # of the bytes of other blocks, from stage to stage
        for t, stage in enumerate(core.stages):
            for b in stage.reads:
                self._use(b, t)

    def fit(self, budget_bytes: int) -> bool:
        """Drop gaps until what ops need is within the budget; False if nothing is left to drop."""
        while True:
            live = [own + kept for own, kept in zip(self.own_bytes, accumulate(self.change), strict=False)]
            worst = max(range(len(live)), key=live.__getitem__)
            excess = live[worst] - budget_bytes
            if excess <= 0:
                return True
            over = [0, *accumulate(x > budget_bytes for x in live)]
            choices = sorted(self._choice(gap, over) for gap in self._gaps(worst))
            spend(STAGE_S * len(live) + CHOICE_S * len(choices))
            if not choices or choices[0].ns_per_byte == math.inf:
                return False
            for choice in choices:
                gap = choice.gap
                if choice.ns_per_byte == math.inf:
                    break
                self._drop(choice)
                excess -= self.core.block_bytes[gap[0]]
                if excess <= 0:
                    break

    def draft(self) -> Draft:
        """What is saved and run as things stand."""
        saved = {
            b for b, uses in enumerate(self.uses) if uses[0] < 0 and uses[1:] and uses[1] not in self.made[b]
        }
        return Draft(frozenset(saved), tuple(tuple(sorted(units)) for units in self.runs))

    def _gaps(self, t: int) -> Iterator[Gap]:
        """Gaps that hold a block through stage t, which does not use it."""
        for b, uses in enumerate(self.uses):
            i = bisect_left(uses, t)
            is_gap = 0 < i < len(uses) and uses[i] > t and uses[i] not in self.made[b]
            if is_gap and not self.core.units[self.core.maker[b]].pinned:
                yield b, uses[i - 1], uses[i]

    def _choice(self, gap: Gap, over: list[int]) -> Choice:
        """How to drop ``gap``: with what its unit reads kept, or with all made again that is not there."""
        b, first, last = gap
        freed = self.core.block_bytes[b] * (over[last] - over[first + 1])
        found = []
        for units in ((self.core.maker[b],), tuple(self._missing(b, last))):
            cost = sum(self.core.units[u].cost_ns for u in units if u not in self.runs[last])
            made = {x for u in units for x in self.core.units[u].makes}
            reads = {x for u in units for x in self.core.units[u].reads} - made - self.core.held
            more = sum(self._extra(x, last, over) for x in reads)
            found.append(Choice(cost / (freed - more) if freed > more else math.inf, gap, units))
        return min(found)

    def _extra(self, b: int, t: int, over: list[int]) -> int:
        """Bytes in each stage over the budget that it takes to keep b up to stage t."""
        before = self._last_use(b, t)
        return 0 if before is None else self.core.block_bytes[b] * (over[t] - over[before + 1])

    def _missing(self, b: int, t: int) -> list[int]:
        """The unit of b, and those of what it reads that is not there in stage t, pinned ones aside."""
        units, maker = self.core.units, self.core.maker
        found = {maker[b]}
        stack = [maker[b]]
        while stack:
            for x in units[stack.pop()].reads:
                is_there = x in self.core.held or self._last_use(x, t) is None
                if not is_there and maker[x] not in found and not units[maker[x]].pinned:
                    found.add(maker[x])
                    stack.append(maker[x])
        return sorted(found)

    def _last_use(self, b: int, t: int) -> int | None:
        """The use of b before stage t, to keep it from; None if it is there in stage t anyway."""
        uses = self.uses[b]
        i = bisect_left(uses, t)
        is_there = i < len(uses) and (uses[i] == t or uses[i] not in self.made[b])
        return None if is_there else uses[i - 1]

    def _use(self, b: int, t: int) -> None:
        """b is read in stage t, and kept up to there."""
        if b in self.core.held:
            return
        before = self._last_use(b, t)
        if before is not None:
            self._count(b, before, t, 1)
        if t not in self.uses[b]:
            insort(self.uses[b], t)

    def _count(self, b: int, first: int, last: int, sign: int) -> None:
        """A gap of b, or one less: its bytes in each stage whose op does not read or make it anyway."""
        if first < 0 or b in self.reads[first] or self.core.born[self.core.maker[b]] == first:
            first += 1
        self.change[first] += sign * self.core.block_bytes[b]
        self.change[last] -= sign * self.core.block_bytes[b]

    def _drop(self, choice: Choice) -> None:
        b, first, last = choice.gap
        self._count(b, first, last, -1)
        self.made[b].add(last)
        for u in choice.units:
            self.runs[last].add(u)
            for x in self.core.units[u].makes:
                self._make(x, last)
            for x in self.core.units[u].reads:
                self._use(x, last)

    def _make(self, b: int, t: int) -> None:
        """b is made in stage t, unless it is there."""
        if b not in self.core.held and self._last_use(b, t) is not None:
            insort(self.uses[b], t)
            self.made[b].add(t)
