"""The way back over one segment of a chain, for every set of its blocks and all that its prefix may hold.

What the prefix is, and why no plan costs less, says `prefix`. Here all is tables: the first axis is the set
of the segment's blocks at hand (a number, a bit for each), the others are levels of bytes that the prefix
before the segment holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rematc.solve.merge import Merged
from rematc.solve.reduce import Stage
from rematc.solve.segments import Chain

NEVER = np.float32(np.inf)

Table = Any  # of float32


class Costs(NamedTuple):
    """What a prefix costs, by the bytes that it holds."""

    back: Table
    made: Table
    again: Table


class Numbers(NamedTuple):
    """What is common to all parts: the budget, bytes of a level, how many there are, ns of a cost."""

    limit: int
    unit: int
    n_levels: int
    quantum: int


class _Run(NamedTuple):
    """A unit: sets of bits for what it reads and makes, what it surely takes beside the former, its cost."""

    reads: int
    makes: int
    lead_bytes: int
    cost: float


def _run(merged: Merged, u: int, bits: Callable[[Iterable[int]], int], quantum: int) -> _Run:
    unit = merged.core.units[u]
    cost = math.inf if unit.pinned and unit.required else unit.cost_ns // quantum
    return _Run(bits(unit.reads), bits(unit.makes), merged.lead_bytes(u), cost)


class Part:
    """A segment: its blocks, and first what enters it; ``sets`` of them are numbers, a bit for each block."""

    def __init__(self, merged: Merged, chain: Chain, s: int, numbers: Numbers) -> None:
        core, self.segment = chain.core, chain.segments[s]
        self.core = core
        self.limit, self.unit, self.n_levels, quantum = numbers
        free = chain.always | core.held
        self.enters = None if self.segment.enters in free else self.segment.enters
        self.leaves = chain.segments[s + 1].enters if s + 1 < len(chain.segments) else None
        made = (b for u in self.segment.units for b in core.units[u].makes)
        own = [b for b in made if b not in free and b != self.leaves]
        self.blocks = own if self.enters is None else [self.enters, *own]
        named = self.blocks if self.leaves is None else [*self.blocks, self.leaves]
        self.bit = {b: 1 << n for n, b in enumerate(named)}
        self.runs = [_run(merged, u, self.bits, quantum) for u in self.segment.units]
        self.ask = 0 if self.enters is None else core.units[core.maker[self.enters]].cost_ns // quantum
        self.levels = np.arange(self.n_levels)

    def bits(self, blocks: Iterable[int]) -> int:
        """``blocks`` as a set; those of other segments are nothing here."""
        return sum(self.bit.get(b, 0) for b in {*blocks})

    def work(self) -> float:
        """Entries of the largest tables, times how often they are looked at."""
        each = (len(self.segment.stages) + 1) * (len(self.runs) + len(self.blocks) + 2)
        return float(each * self.n_levels**2 * 2 ** len(self.blocks))

    def fits(self, size: Table, room: float) -> Table:
        """By set and level: do its ``size`` and what the prefix holds fit?"""
        return size[:, None] + self.levels * self.unit <= room

    def costs(self, prefix: Costs | None) -> Costs:
        """Those of the prefix that ends with this segment, from those of the one before, if there is one."""
        self.sets = np.arange(1 << len(self.blocks))
        self.bytes = np.zeros(len(self.sets), np.int64)
        for b in self.blocks:
            self.bytes[self.sets & self.bit[b] != 0] += self.core.block_bytes[b]
        self.full = self.bytes // self.unit
        self.asks = prefix is not None and self.enters is not None
        back = prefix.back if prefix else np.zeros(self.n_levels, np.float32)
        way = Back(self, prefix if prefix and self.asks else Costs(back, *_nothing(self.n_levels)))
        for t in reversed(self.segment.stages):
            way.over(self.core.stages[t])
        return way.costs()

    def closure(self, to: int, *, asks: bool) -> tuple[Table, Table]:
        """By set: its level, and what it costs to make the set ``to`` and what leaves the part; never if that
        asks for what enters it, or does not.
        """
        leaves = 0 if self.leaves is None else self.bit[self.leaves]
        need, ns = (to | leaves) & ~self.sets, np.zeros(len(self.sets), np.float32)
        for run in reversed(self.runs):
            runs = need & run.makes != 0
            ns[runs] += np.float32(run.cost)
            need[runs] |= run.reads & ~self.sets[runs]
        is_asked = need & 1 != 0 if self.enters is not None else np.zeros(len(need), bool)
        ns[(is_asked != asks) | (self.full >= self.n_levels)] = NEVER
        return self.full, ns


class Back:
    """The way back over ``part``, from its end to its beginning: tables by the set of blocks at hand.

    ``rest`` is the time of the part's own runs where the prefix before it is not asked any more, by the
    bytes that it holds; ``once`` where it is asked once, by those now and those then; ``more`` where it is
    asked more often, by those now and those at last, and ``mid`` the same after the first time, by those at
    last: what it holds between is not counted, and each time but one costs the unit that is asked for. In
    ``apart`` it is asked more often, too, but each time stands on its own; by what it holds now, all costs.
    """

    def __init__(self, part: Part, prefix: Costs) -> None:
        self.part, self.prefix = part, prefix
        n, levels = len(part.sets), part.n_levels
        self.rest = np.zeros((n, levels), np.float32)
        self.mid, self.apart = np.full((2, n, levels), NEVER)
        self.once, self.more = np.full((2, n, levels, levels), NEVER)

    def over(self, stage: Stage) -> None:
        """To the beginning of ``stage``."""
        part = self.part
        self._drop()
        reads = part.bits(stage.reads) & part.sets[-1]
        fits = part.fits(part.bytes, part.limit - stage.op_bytes) & (part.sets & reads == reads)[:, None]
        for table in self._tables():
            self._forbid(table, ~fits)
        self._run(part.limit - stage.before_bytes)

    def _tables(self) -> tuple[Table, ...]:
        return self.rest, self.mid, self.apart, self.once, self.more

    def _forbid(self, table: Table, never: Table) -> None:
        """By set and level; in ``mid`` what the prefix holds now is not counted."""
        by_level = never[:, :1] if table is self.mid else never
        np.copyto(table, NEVER, where=by_level.reshape(*by_level.shape, *[1] * (table.ndim - 2)))

    def _drop(self) -> None:
        """Any block may go."""
        for table in self._tables():
            for n in range(len(self.part.blocks)):
                view = table.reshape(-1, 2, 1 << n, *table.shape[1:])
                np.minimum(view[:, 1], view[:, 0], out=view[:, 1])

    def _run(self, room: float) -> None:
        """Any units may run, in any order, and the prefix be asked, within ``room`` bytes."""
        is_changed = True
        while is_changed:
            is_changed = False
            for run in reversed(self.part.runs):
                if run.cost < math.inf and run.makes & self.part.sets[-1]:
                    is_changed |= self._run_one(run, room)
            is_changed |= self.part.asks and self._ask(room)
            self._drop()

    def _run_one(self, run: _Run, room: float) -> bool:
        part, sets = self.part, self.part.sets
        reads, makes = run.reads & sets[-1], run.makes & sets[-1]
        before = sets[(sets & reads == reads) & (sets & makes != makes)]
        size = part.bytes[before & ~makes] + run.lead_bytes
        fits, is_changed = part.fits(size, room), False
        for table in self._tables():
            after = table[before | makes] + np.float32(run.cost)
            by_level = fits[:, :1] if table is self.mid else fits
            np.copyto(after, NEVER, where=~by_level.reshape(*by_level.shape, *[1] * (table.ndim - 2)))
            is_changed |= _lower(table, before, after)
        return is_changed

    def _ask(self, room: float) -> bool:
        """The prefix makes what enters the part."""
        part, prefix = self.part, self.prefix
        before = part.sets[part.sets & 1 == 0]
        after = before | 1
        now, then = part.fits(part.bytes[before], room), part.fits(part.bytes[after], room)
        last = np.where(then, self.rest[after], NEVER)
        again = np.where(then[:, :1], self.mid[after] + np.float32(part.ask), NEVER)
        later = np.minimum((self.once[after] + prefix.again).min(axis=(1, 2)), self.apart[after].min(axis=1))
        is_changed = _lower(self.mid, before, np.where(now[:, :1], np.minimum(last, again), NEVER))
        is_changed |= _lower(self.apart, before, np.where(now, prefix.made + later[:, None], NEVER))
        is_changed |= _lower(self.once, before, np.where(now[:, :, None], last[:, None], NEVER))
        return is_changed | _lower(self.more, before, np.where(now[:, :, None], again[:, None], NEVER))

    def costs(self) -> Costs:
        """At the beginning of the part: of the prefix that ends with it."""
        self._drop()
        self._run(np.inf)  # what ran before its first stage, when there was more room
        part, prefix = self.part, self.prefix
        asked = np.maximum(self.apart, (self.more + prefix.again).min(axis=2))
        asked = np.minimum(asked, (self.once + prefix.again).min(axis=2))
        every = np.minimum(asked, self.rest + prefix.back)
        back = np.full(part.n_levels, NEVER)
        for s in part.sets[part.full < part.n_levels]:
            _lower_from(back, part.full[s], every[s])
        if part.leaves is None:
            return Costs(back, *_nothing(part.n_levels))
        return Costs(back, *self._made(every, asked))

    def _made(self, every: Table, asked: Table) -> tuple[Table, Table]:
        """``made`` and ``again``: from each set to each other what leaves the part is made, in one go."""
        part, prefix = self.part, self.prefix
        made, again = _nothing(part.n_levels)
        for level, ns in _falling(*part.closure(0, asks=False)):
            _lower_from(made, level, np.full_like(made, ns))
        for level, ns in _falling(*part.closure(0, asks=True)):
            _lower_from(made, level, prefix.made + ns)
        for s in part.sets[part.full < part.n_levels]:
            to, left = part.full[s], part.n_levels - part.full[s]
            for level, ns in _falling(*part.closure(s, asks=False)):
                at = np.arange(part.n_levels - max(level, to))
                again[at + level, at + to] = np.minimum(again[at + level, at + to], every[s][: len(at)] + ns)
            thrice = (self.mid[s] + prefix.again).min(axis=1) + np.float32(part.ask)
            then = np.maximum(prefix.made[:, None] + asked[s], thrice[:, None])
            then = np.minimum(then, prefix.again + self.rest[s])[:, :left]
            for level, ns in _falling(*part.closure(s, asks=True)):
                rows = again[level:, to:]
                np.minimum(rows, then[: part.n_levels - level] + ns, out=rows)
        np.minimum.accumulate(again, axis=0, out=again)
        return made, np.minimum.accumulate(again, axis=1, out=again)


def _nothing(n_levels: int) -> tuple[Table, Table]:
    return np.full(n_levels, NEVER), np.full((n_levels, n_levels), NEVER)


def _lower(table: Table, sets: Table, new: Table) -> bool:
    """Entries of ``sets`` to those that are ``new``, where lower; False if none are."""
    old = table[sets]
    if not (new < old).any():
        return False
    table[sets] = np.minimum(old, new)
    return True


def _lower_from(table: Table, level: int, new: Table) -> None:
    """From ``level`` on, to what is ``new`` from 0 on; who holds more pays no more."""
    np.minimum(table[level:], new[: len(table) - level], out=table[level:])
    np.minimum.accumulate(table, out=table)


def _falling(levels: Table, ns: Table) -> Iterator[tuple[int, Any]]:
    """Of sets by their levels and costs those that are cheaper than all with fewer levels."""
    best = NEVER
    for n in np.lexsort((ns, levels)):
        if ns[n] < best:
            best = ns[n]
            yield int(levels[n]), best
