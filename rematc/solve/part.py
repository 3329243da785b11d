"""A segment of a chain as numbers: its blocks as sets of bits, their bytes as levels, its units' costs.

For a bound bytes are rounded down, for a plan to the nearest level: what is off adds up to little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rematc.solve.merge import Merged
from rematc.solve.segments import Chain

NEVER = np.float32(np.inf)
CALLS, STEP = 60_000, 25_000  # entries that could be looked at while numpy is called, and to find a step

Table = Any  # of float32


class Numbers(NamedTuple):
    """What is common to all parts: the budget, bytes of a level, how many there are, ns of a cost.

    ``for_plan``: they are to say a plan, not a bound.
    """

    limit: int
    level_bytes: int
    n_levels: int
    quantum: int
    for_plan: bool = False


class Run(NamedTuple):
    """A unit: sets of bits for what it reads and makes, what it takes beside the former, its cost.

    For a bound that is what it surely takes, whatever of it runs.
    """

    reads: int
    makes: int
    own_bytes: int
    cost: float


def _run(merged: Merged, u: int, bits: Callable[[Iterable[int]], int], numbers: Numbers) -> Run:
    unit = merged.core.units[u]
    cost = math.inf if unit.pinned and unit.required else unit.cost_ns // numbers.quantum
    own_bytes = max(size for _, size in merged.steps(u)) if numbers.for_plan else merged.lead_bytes(u)
    return Run(bits(unit.reads), bits(unit.makes), own_bytes, cost)


class Part:
    """A segment: its blocks, and first what enters it; ``sets`` of them are numbers, a bit for each block."""

    def __init__(self, merged: Merged, chain: Chain, s: int, numbers: Numbers) -> None:
        core, self.segment = chain.core, chain.segments[s]
        self.core = core
        self.limit, self.level_bytes, self.n_levels, quantum, self.for_plan = numbers
        free = chain.always | core.held
        self.enters = next(iter(self.segment.enters - free), None)  # of `single_chain_of`: one at the most
        after = chain.segments[s + 1].enters if s + 1 < len(chain.segments) else ()
        self.leaves = next(iter(after), None)
        made = (b for u in self.segment.units for b in core.units[u].makes)
        own = [b for b in made if b not in free and b != self.leaves]
        self.blocks = own if self.enters is None else [self.enters, *own]
        named = self.blocks if self.leaves is None else [*self.blocks, self.leaves]
        self.bit = {b: 1 << n for n, b in enumerate(named)}
        self.leaving = 0 if self.leaves is None else self.bit[self.leaves]
        self.runs = [_run(merged, u, self.bits, numbers) for u in self.segment.units]
        self.ask = 0 if self.enters is None else core.units[core.maker[self.enters]].cost_ns // quantum
        self.levels = np.arange(self.n_levels)
        self.asks = s > 0 and self.enters is not None

    @cached_property
    def sets(self) -> Any:
        """All sets of the blocks."""
        return np.arange(1 << len(self.blocks))

    @cached_property
    def bytes(self) -> Any:
        """Of each set."""
        found = np.zeros(len(self.sets), np.int64)
        for b in self.blocks:
            found[self.sets & self.bit[b] != 0] += self.core.block_bytes[b]
        return found

    @cached_property
    def full(self) -> Any:
        """Levels of each set."""
        more = self.level_bytes // 2 if self.for_plan else 0
        return (self.bytes + more) // self.level_bytes

    def bits(self, blocks: Iterable[int]) -> int:
        """``blocks`` as a set; those of other segments are nothing here."""
        return sum(self.bit.get(b, 0) for b in {*blocks})

    def blocks_of(self, s: int) -> list[int]:
        """Those of the set ``s``."""
        return [b for b in self.blocks if s & self.bit[b]]

    def work(self) -> tuple[int, int]:
        """What it takes to fill the tables, in entries looked at, and how many entries the largest have."""
        sets, each = 2 ** len(self.blocks), len(self.runs) + len(self.blocks) + 2
        entries = sets * self.n_levels**2
        tables = entries // 2 if self.for_plan else entries  # one large one in place of two
        looks = (len(self.segment.stages) + 1) * each * (tables + CALLS) + sets * len(self.runs) * STEP
        return looks, entries

    def fits(self, size: Table, levels: Table, room: float) -> Table:
        """By set and level: do its ``size`` and what the prefix holds fit?"""
        return size[:, None] + levels * self.level_bytes <= room

    def cheapest(self, to: int, *, asks: bool) -> Iterator[tuple[int, Any]]:
        """Sets from which the set ``to`` and what leaves the part are made, and what that takes: those that
        are cheaper than all with fewer levels. What enters the part is asked for, or not.
        """
        need, ns = (to | self.leaving) & ~self.sets, np.zeros(len(self.sets), np.float32)
        for run in reversed(self.runs):
            runs = need & run.makes != 0
            ns[runs] += np.float32(run.cost)
            need[runs] |= run.reads & ~self.sets[runs]
        is_asked = (need & 1 != 0) & (self.enters is not None)
        ns[(is_asked != asks) | (self.full >= self.n_levels)] = NEVER
        order = np.lexsort((ns, self.full))
        least = np.minimum.accumulate(ns[order])
        is_cheaper = least < np.append(NEVER, least[:-1])
        yield from ((int(s), ns[s]) for s in order[is_cheaper])
