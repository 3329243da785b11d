"""The smallest budget, from both sides: what can't be reached is a bound, what can may be a plan.

`Space` looks for a way through the backward pass that tracks the largest blocks alone. Where the plan that it
says needs more than the limit, blocks that are read there are tracked too, each with the chain that it is in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rematc.problem import Problem
from rematc.solve.along import along
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.expand import Written, excesses, expand
from rematc.solve.merge import Merged
from rematc.solve.reach import Group, Space
from rematc.solve.reduce import Core

FIRST, MORE, MOST = 2, 2, 20  # groups tracked: to begin with, more in each round, and at most
WORK = 1 << 22  # sets of groups, times stages: with more groups only stages around an excess are looked at
MARGIN, NEAR = 16, 30  # stages: before the first excess, and between those that are looked at together
STAGE_S, SET_S = 1e-4, 1e-8  # of work, for each stage, and each set of groups there
TINY = 0.002  # of the largest block: not worth tracking


@dataclass
class Narrowing:
    """``best``: the plan with the lowest peak found. ``bound_bytes``: proven that none needs less.

    ``whole`` is not merged: what merging leaves out counts near the smallest budget.
    """

    problem: Problem
    whole: Merged
    best: Written
    bound_bytes: int

    def run(self, asked_bytes: int, share: float, deadline: Deadline) -> None:
        """Try limits until the two are ``share`` of the bound apart, or a plan needs no more than asked."""
        lowest, highest = self.peak_bytes, self.bound_bytes - 1  # of the limits that could not be decided
        limit: int | None = asked_bytes if self.bound_bytes < asked_bytes < self.peak_bytes else None
        while deadline.left() > 0 and self.peak_bytes > asked_bytes:
            lowest, highest = min(lowest, self.peak_bytes), max(highest, self.bound_bytes - 1)
            limit = limit or self._between(highest + 1, self.peak_bytes, share)
            limit = limit or self._between(self.bound_bytes, lowest, share)
            if limit is None:
                break
            if self._decide(limit, deadline) is None:
                lowest, highest = min(lowest, limit), max(highest, limit)
            limit = None

    @property
    def peak_bytes(self) -> int:
        """Of the best plan."""
        return self.best.plan.peak_bytes

    def _between(self, low: int, high: int, share: float) -> int | None:
        """A limit between two that are far apart: the middle, or what, ruled out, leaves them near."""
        base = self.problem.base_bytes
        if high - low <= share * max(0, low - base, self.bound_bytes - base):
            return None
        middle, enough = (low + high) // 2, base + math.ceil((high - base) / (1 + share))
        return max(middle, enough) if enough < high else middle

    def _decide(self, limit: int, deadline: Deadline) -> bool | None:
        """Is there a plan within ``limit``? None: neither was found nor ruled out."""
        core = self.whole.core
        groups, stages = self._largest(), range(len(core.stages))
        while deadline.left() > 0:
            path = Space(core, groups, stages).path(limit)
            spend(len(stages) * (STAGE_S + SET_S * 2 ** len(groups)))
            if path is None:
                self.bound_bytes = max(self.bound_bytes, limit + 1)
                return False
            written = expand(self.problem, self.whole, along(core, groups, path))
            self.best = min(self.best, written, key=lambda w: w.plan.peak_bytes)
            if written.plan.peak_bytes <= limit:
                return True
            over = self._over(written, limit)
            finer = self._finer(groups, over, written)
            if len(finer) == len(groups) or len(finer) > MOST:
                break
            groups, stages = finer, _around(over, len(core.stages), WORK >> len(finer))
        return None

    def _largest(self) -> list[Group]:
        core = self.whole.core
        blocks = [b for b in range(len(core.block_bytes)) if b not in core.held]
        return [(b,) for b in sorted(blocks, key=lambda b: -core.block_bytes[b])[:FIRST]]

    def _over(self, written: Written, limit: int) -> dict[int, int]:
        """By how much each stage of the backward pass exceeds ``limit``, if it does."""
        over: dict[int, int] = {}
        for _, stage, excess in excesses(self.problem.with_budget(limit), written):
            if stage is not None:
                over[stage] = max(over.get(stage, 0), excess)
        return over

    def _finer(self, groups: list[Group], over: dict[int, int], written: Written) -> list[Group]:
        """More groups: of what the stages ``over`` read, or else halves of those that they run through."""
        if more := self._read_in(over, written, {b for group in groups for b in group}):
            return groups + more[:MORE]
        core = self.whole.core
        made = {b for t in over for u in written.draft.runs[t] for b in core.units[u].makes}
        split = [group for group in groups if len(group) > 1 and made.intersection(group)][:MORE]
        halves = [half for g in split for half in (g[: len(g) // 2], g[len(g) // 2 :])]
        return [group for group in groups if group not in split] + halves

    def _read_in(self, over: dict[int, int], written: Written, known: set[int]) -> list[Group]:
        """Groups of what is read in the stages ``over``: by their ops first, then on the way to them."""
        core, weight = self.whole.core, dict[int, float]()
        for t, excess in over.items():
            on_the_way = (b for u in written.draft.runs[t] for b in core.units[u].reads)
            for blocks, factor in ((core.stages[t].reads, 1.0), (on_the_way, 0.5)):
                for b in blocks:
                    weight[b] = max(weight.get(b, 0.0), factor * excess)
        tiny = TINY * max(core.block_bytes)
        heads = _chains(core, tiny)
        found: dict[Group, float] = {}
        for b, heavy in weight.items():
            if b not in known | core.held and core.block_bytes[b] > tiny:
                chain = (c for c, head in heads.items() if head == heads[b])
                group = tuple(sorted(c for c in chain if c not in known))
                found[group] = max(found.get(group, 0.0), heavy)
        return sorted(found, key=lambda group: (-found[group], -core.block_bytes[group[0]]))


def _chains(core: Core, tiny: float) -> dict[int, int]:
    """The first block of the chain that each block is in: of one size, each made of the one before alone."""
    size, first = core.block_bytes, dict[int, int]()
    for unit in core.units:
        reads = [b for b in unit.reads if b not in core.held and size[b] > tiny]
        for b in unit.makes:
            follows = len(reads) == 1 and size[reads[0]] == size[b] and not unit.pinned and b not in core.held
            first[b] = first[reads[0]] if follows else b
    return first


def _around(over: Iterable[int], n_stages: int, most: int) -> range:
    """The stages to look at: about ``most``, around the first of those ``over`` and those near it."""
    begin = end = min(over)
    for t in sorted(over):
        if t - end <= NEAR:
            end = t
    before = max(MARGIN, (most - (end - begin)) // 2)
    first = max(0, begin - before)
    return range(first, min(n_stages, max(end + MARGIN // 2, first + most)))
