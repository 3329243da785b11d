"""A plan without a MILP: save some blocks for good, and recompute the rest in groups of stages.

Within a group of consecutive stages each missing block is made once, right before its first use,
and kept to its last use there; between groups only saved blocks live on. Groups are as long as the
budget lets them be. With nothing saved and a group for each stage this needs the least memory and
the most time; then blocks are saved, one by one, as long as that makes the whole cheaper.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rematc.solve.reduce import Core

CANDIDATES = 160


@dataclass(frozen=True, slots=True)
class Draft:
    """The blocks saved, the units run in each stage, their time, and the peak of it all in bytes."""

    saved: frozenset[int]
    runs: tuple[tuple[int, ...], ...]
    cost_ns: int
    peak_bytes: int

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The (unit, stage) pairs at which a unit runs."""
        return frozenset((u, t) for t, units in enumerate(self.runs) for u in units)


def lowest(tail: Tail) -> Draft:
    """The draft with the lowest peak: every stage on its own, what is saved chosen to lower the peak."""
    best = tail.draft(tail.forced, None)
    for b in tail.candidates:
        draft = tail.draft(best.saved | {b}, None)
        if draft.peak_bytes < best.peak_bytes:
            best = draft
    return best


def greedy(core: Core, budget_bytes: int, deadline: float) -> Draft:
    """The cheapest draft found under the budget by ``deadline`` (`time.monotonic`).

    If none fits, the peak of what is returned is above it.
    """
    tail = Tail(core)
    best = tail.draft(tail.forced, budget_bytes)
    if best.peak_bytes > budget_bytes:
        low = lowest(tail)
        if low.peak_bytes > budget_bytes:
            return low
        best = tail.draft(low.saved, budget_bytes)
    for change in (frozenset.union, frozenset.difference):
        for b in tail.candidates:
            saved = change(best.saved, frozenset((b,))) | tail.forced
            if saved == best.saved:
                continue
            if time.monotonic() > deadline:
                return best
            draft = tail.draft(saved, budget_bytes)
            if draft.peak_bytes <= budget_bytes and draft.cost_ns < best.cost_ns:
                best = draft
    return best


class Tail:
    """The backward pass of a core, to try sets of saved blocks on."""

    def __init__(self, core: Core) -> None:
        self.core = core

    @cached_property
    def forced(self) -> frozenset[int]:
        """What can't be made again and is read in the backward pass, recomputation included."""
        core = self.core
        needed = core.upstream(b for s in core.stages for b in s.reads)
        read = {b for s in core.stages for b in s.reads} | {b for u in needed for b in core.units[u].reads}
        return frozenset(b for b in read if core.units[core.maker[b]].pinned) - core.held

    @cached_property
    def candidates(self) -> list[int]:
        """Blocks worth a try: those that stand for the most time of recomputation for their bytes."""
        core = self.core
        needed = core.upstream(b for s in core.stages for b in s.reads)
        worth = {}
        for b, size in enumerate(core.block_bytes):
            if core.maker[b] in needed and b not in core.held | self.forced:
                readers = {w for w in core.readers[b] if w in needed}
                uses = len(readers) + len([s for s in core.stages if b in s.reads])
                if uses:
                    worth[b] = sum(core.units[u].cost_ns for u in core.upstream([b])) * uses / (size + 1)
        return sorted(worth, key=lambda b: (-worth[b], b))[:CANDIDATES]

    def draft(self, saved: frozenset[int], budget_bytes: int | None) -> Draft:
        """Save ``saved``, and group the stages as the budget lets; None: each on its own."""
        core, stages = self.core, self.core.stages
        kept = self._kept_bytes(saved)
        peak = _forward_peak(core, saved)
        runs: list[tuple[int, ...]] = []
        while len(runs) < len(stages):
            first = len(runs)
            group, live = self._group(saved, kept, range(first, first + 1))
            step = 1
            while budget_bytes is not None and first + len(group) < len(stages):
                longer = range(first, min(len(stages), first + len(group) + step))
                tried, tried_live = self._group(saved, kept, longer)
                if tried_live <= budget_bytes:
                    group, live, step = tried, tried_live, step * 2
                elif step == 1:
                    break
                else:
                    step = 1
            runs += group
            peak = max(peak, live)
        cost = sum(core.units[u].cost_ns for group in runs for u in group)
        return Draft(saved, tuple(runs), cost, peak)

    def _kept_bytes(self, saved: frozenset[int]) -> list[int]:
        """Bytes of saved blocks alive at each stage: up to the last that may read them."""
        core = self.core
        alive, found = 0, []
        needed: set[int] = set()
        for stage in reversed(core.stages):
            new = self._missing(stage.reads, saved)
            touched = {*stage.reads, *(b for u in new for b in core.units[u].reads)} & saved
            alive += sum(core.block_bytes[b] for b in touched - needed)
            needed |= touched
            found.append(alive)
        return found[::-1]

    def _missing(self, blocks: Iterable[int], at_hand: frozenset[int] | set[int]) -> list[int]:
        """Units to run, in order, so that ``blocks`` are at hand."""
        core, found = self.core, set()
        stack = [b for b in blocks if b not in at_hand]
        while stack:
            u = core.maker[stack.pop()]
            if u not in found:
                found.add(u)
                stack.extend(b for b in core.units[u].reads if b not in at_hand and b not in core.held)
        return sorted(found)

    def _group(
        self, saved: frozenset[int], kept: Sequence[int], stages: range
    ) -> tuple[list[tuple[int, ...]], int]:
        """The units that each of ``stages`` runs when nothing but ``saved`` is there, and their peak."""
        core, size = self.core, self.core.block_bytes
        at_hand = set(saved)
        runs: list[tuple[int, ...]] = []
        last: dict[int, int] = {}
        clock = 0
        for t in stages:
            new = self._missing(core.stages[t].reads, at_hand)
            for u in new:
                for b in (*core.units[u].reads, *core.units[u].makes):
                    last[b] = clock
                at_hand.update(core.units[u].makes)
                clock += 1
            last.update(dict.fromkeys(core.stages[t].reads, clock))
            clock += 1
            runs.append(tuple(new))
        live = peak = clock = 0
        dying: dict[int, int] = {}
        for t, units in zip(stages, runs, strict=True):
            stage = core.stages[t]
            for u in units:
                for b in core.units[u].makes:
                    live += size[b]
                    dying[last[b]] = dying.get(last[b], 0) + size[b]
                peak = max(peak, stage.before_bytes + kept[t] + live + core.units[u].workspace_bytes)
                live -= dying.pop(clock, 0)
                clock += 1
            peak = max(peak, stage.op_bytes + kept[t] + live)
            live -= dying.pop(clock, 0)
            clock += 1
            if stage.after_bytes:
                peak = max(peak, stage.after_bytes + kept[t] + live)
        return runs, peak


def _forward_peak(core: Core, saved: frozenset[int]) -> int:
    """The peak of the forward pass that saves ``saved``."""
    required = {u for u, unit in enumerate(core.units) if unit.required}
    run = sorted(required | core.upstream(saved))
    death = {}
    for u in run:
        death.update(dict.fromkeys((*core.units[u].reads, *core.units[u].makes), u))
    death.update(dict.fromkeys((*core.held, *saved), len(core.units)))
    live = peak = core.resident_bytes
    dying: dict[int, int] = {}
    for u in run:
        for b in core.units[u].makes:
            live += core.block_bytes[b]
            dying[death[b]] = dying.get(death[b], 0) + core.block_bytes[b]
        peak = max(peak, live + core.units[u].workspace_bytes)
        live -= dying.pop(u, 0)
    return peak
