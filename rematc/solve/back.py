"""The way back over one segment of a chain, for every set of its blocks and all that its prefix may hold.

What the prefix is, and why no plan costs less, says `prefix`. Here all is tables: the first axis is the set
of the segment's blocks at hand (a number, a bit for each), the others are levels of bytes that the prefix
before the segment holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rematc.solve.part import NEVER, Part, Run, Table
from rematc.solve.reduce import Stage


class Costs(NamedTuple):
    """What a prefix costs, by the bytes that it holds, and then holds."""

    back: Table
    made: Table
    again: Table


class Step(NamedTuple):
    """The part goes over from the set ``before`` to ``after``, and makes what leaves it. That takes ``ns``.

    ``later`` is what comes then, by what the prefix before it holds; if it ``asks`` that, before and after.
    """

    before: int
    after: int
    asks: bool
    ns: Any
    later: Table


def back_over(part: Part, prefix: Costs | None) -> Back:
    """The way over ``part``, from the costs of the prefix that it follows, if it follows one."""
    before = prefix.back if prefix else np.zeros(part.n_levels, np.float32)
    way = Back(part, prefix if prefix and part.asks else Costs(before, *_nothing(part.n_levels)))
    for t in reversed(part.segment.stages):
        way.over(part.core.stages[t])
        way.run(part.limit - part.core.stages[t].before_bytes)
    way.run(math.inf)  # what ran before the first stage, when there was more room
    return way


class Back:
    """The way back over ``part``, from its end to its beginning: tables by the set of blocks at hand.

    ``rest`` is the time of the part's own runs where the prefix before it is not asked any more, by the
    bytes that it holds; ``once`` where it is asked once, by those now and those then; ``more`` where it is
    asked more often, by those now and those at last, and ``mid`` the same after the first time, by those at
    last: what it holds between is not counted, and each time but one costs the unit that is asked for. In
    ``apart`` it is asked more often, too, but what it does each time stands on its own, and what it holds
    between counts; by what it holds now, all costs.
    For a plan it is asked once at most: else what it holds between would have to be counted.

    ``now`` and ``then`` are the levels to look at; all, if not given.
    """

    def __init__(self, part: Part, prefix: Costs, now: Table = None, then: Table = None) -> None:
        self.part, self.prefix = part, prefix
        self.now = part.levels if now is None else now
        self.then = part.levels if then is None else then
        n, n_now, n_then = len(part.sets), len(self.now), len(self.then)
        self.rest = np.zeros((n, n_then), np.float32)
        self.mid = np.full((n, n_then), NEVER)
        self.apart = np.full((n, n_now), NEVER)
        self.once = np.full((n, n_now, n_then), NEVER)
        self.more = np.broadcast_to(NEVER, self.once.shape) if part.for_plan else self.once.copy()
        nothing = np.zeros(1, np.int64)
        several = ((self.mid, nothing), (self.apart, self.now), (self.more, self.now))
        self.tables = ((self.rest, self.then), (self.once, self.now), *(() if part.for_plan else several))

    def over(self, stage: Stage) -> None:
        """To the moment when the op of ``stage`` begins."""
        part = self.part
        self._drop()
        reads = part.bits(stage.reads) & part.sets[-1]
        for table, levels in self.tables:
            fits = part.fits(part.bytes, levels, part.limit - stage.op_bytes)
            _forbid(table, fits & (part.sets & reads == reads)[:, None])

    def run(self, room: float) -> None:
        """Any units may run, in any order, and the prefix be asked, within ``room`` bytes."""
        self._drop()
        is_changed = True
        while is_changed:
            is_changed = False
            for run in reversed(self.part.runs):
                if run.cost < math.inf and run.makes & self.part.sets[-1]:
                    is_changed |= self._run_one(run, room)
            is_changed |= self.part.asks and self._ask(room)
            self._drop()

    def _drop(self) -> None:
        """Any block may go."""
        for table, _ in self.tables:
            for n in range(len(self.part.blocks)):
                view = table.reshape(-1, 2, 1 << n, *table.shape[1:])
                np.minimum(view[:, 1], view[:, 0], out=view[:, 1])

    def _run_one(self, run: Run, room: float) -> bool:
        part, sets = self.part, self.part.sets
        reads, makes = run.reads & sets[-1], run.makes & sets[-1]
        before = sets[(sets & reads == reads) & (sets & makes != makes)]
        size, is_changed = part.bytes[before & ~makes] + run.own_bytes, False
        for table, levels in self.tables:
            after = table[before | makes] + np.float32(run.cost)
            is_changed |= _lower(table, before, _forbid(after, part.fits(size, levels, room)))
        return is_changed

    def _ask(self, room: float) -> bool:
        """The prefix makes what enters the part."""
        part, prefix = self.part, self.prefix
        before = part.sets[part.sets & 1 == 0]
        after = before | 1
        now = part.fits(part.bytes[before], self.now, room)
        at_all = part.bytes[before, None] <= room
        last = np.where(part.fits(part.bytes[after], self.then, room), self.rest[after], NEVER)
        is_changed = _lower(self.once, before, np.where(now[:, :, None], last[:, None], NEVER))
        if part.for_plan:
            return is_changed
        again = np.where(part.bytes[after, None] <= room, self.mid[after] + np.float32(part.ask), NEVER)
        first = (prefix.made[np.ix_(self.now, self.now)] + self._asked(after)[:, None]).min(axis=2)
        is_changed |= _lower(self.mid, before, np.where(at_all, np.minimum(last, again), NEVER))
        is_changed |= _lower(self.apart, before, np.where(now, first, NEVER))
        return is_changed | _lower(self.more, before, np.where(now[:, :, None], again[:, None], NEVER))

    @cached_property
    def asked(self) -> Table:
        """All costs where the prefix before it is asked, by what that holds."""
        return self._asked(self.part.sets)

    def _asked(self, sets: Table) -> Table:
        again = self.prefix.again[np.ix_(self.now, self.then)]
        once = (self.once[sets] + again).min(axis=2)
        if self.part.for_plan:
            return once
        return np.minimum(np.maximum(self.apart[sets], (self.more[sets] + again).min(axis=2)), once)

    @cached_property
    def every(self) -> Table:
        """All costs, asked or not."""
        return np.minimum(self.asked, self.rest + self.prefix.back)

    def costs(self) -> Costs:
        """At the beginning of the part: of the prefix that ends with it."""
        part = self.part
        back = np.full(part.n_levels, NEVER)
        for s in part.sets[part.full < part.n_levels]:
            _lower_from(back, part.full[s], self.every[s])
        if part.leaves is None:
            return Costs(back, *_nothing(part.n_levels))
        return Costs(back, *self._made())

    def steps(self) -> Iterator[Step]:
        """All that could be cheapest in which what leaves the part is made."""
        part, prefix = self.part, self.prefix
        for s in part.sets[part.full < part.n_levels]:
            for before, ns in part.cheapest(s, asks=False):
                yield Step(before, int(s), False, ns, self.every[s])
            later = prefix.again + self.rest[s]
            if not part.for_plan:
                several = (self.mid[s] + prefix.again).min(axis=1) + np.float32(part.ask)
                more = np.maximum(prefix.made + self.asked[s], several[:, None])
                later = np.minimum(later, more)
            for before, ns in part.cheapest(s, asks=True):
                yield Step(before, int(s), True, ns, later)

    def _made(self) -> tuple[Table, Table]:
        """``made`` and ``again``."""
        n, full, (made, again) = self.part.n_levels, self.part.full, _nothing(self.part.n_levels)
        for step in self.steps():
            b, c = full[step.before], full[step.after]
            if step.asks:
                at: Any = np.s_[b:, c:]
                of_prefix, later = (t[: n - b, : n - c] for t in (self.prefix.made, step.later))
            else:  # the prefix before it stays as it is
                held = np.arange(n - max(b, c))
                at, of_prefix, later = (held + b, held + c), np.float32(0), step.later[: len(held)]
            made[at] = np.minimum(made[at], of_prefix + step.ns)
            again[at] = np.minimum(again[at], later + step.ns)
        np.minimum.accumulate(again, axis=1, out=again)  # who holds more pays no more
        return np.minimum.accumulate(made, axis=0), np.minimum.accumulate(again, axis=0)


def _nothing(n_levels: int) -> tuple[Table, Table]:
    return np.full((n_levels, n_levels), NEVER), np.full((n_levels, n_levels), NEVER)


def _forbid(table: Table, fits: Table) -> Table:
    """``table``, where sets and levels don't fit never."""
    np.copyto(table, NEVER, where=~fits.reshape(*fits.shape, *[1] * (table.ndim - 2)))
    return table


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
