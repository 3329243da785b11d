"""The cheapest way back over one segment, from every set of its blocks that could be kept, within a limit.

With K the blocks at hand, and V(t, K) the least time of all that runs again from the beginning of stage t on:

    V(t, K) = the least of
        V(t, K - b)                        b goes
        time of u + V(t, K + what u makes) u runs again, where all that it reads is in K
        V(t+1, K)                          the op of t runs, where all that it reads is in K

each where what is alive then is within the limit. The sets are few, so this is done for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST = 14  # blocks: there are 16384 sets of them

Runs = tuple[tuple[int, ...], ...]  # units by stage


@dataclass(frozen=True, slots=True)
class Run:
    """A unit: sets of bits for what it reads and makes, and ``steps``: what it still reads, its own bytes."""

    unit: int
    reads: int
    makes: int
    cost_ns: int
    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A stage: the bits that its op reads, and bytes alive beside the set, before it and while it runs."""

    reads: int
    before_bytes: int
    op_bytes: int


@dataclass(frozen=True)
class _Move:
    """From each set of ``source`` to the one of ``target``: unit ``unit``, or None where a block goes."""

    unit: int | None
    source: Any
    target: Any
    cost_ns: int
    extra_bytes: int


class Ways:
    """V for the blocks of ``size``, and what to do.

    >>> ways = Ways((8, 8), [Run(7, 0b01, 0b10, 5, ((0b01, 8),))], [Point(0b10, 0, 0)], 16)
    >>> ways.least_ns(0b10), ways.least_ns(0b01), ways.runs(0b01), ways.least_ns(0)
    (0, 5, ((7,),), None)
    """

    def __init__(self, size: Sequence[int], runs: Sequence[Run], points: Sequence[Point], limit: int) -> None:
        self.limit = limit
        self.sets = np.arange(1 << len(size))
        self.bytes = np.zeros(len(self.sets), dtype=np.int64)
        for n, each in enumerate(size):
            self.bytes[self.sets >> n & 1 == 1] += each
        self.moves = [self._gone(n) for n in range(len(size))]
        self.moves += [move for run in reversed(runs) for move in self._moves(run)]
        self.least, self.choices, wanted = np.zeros(1), list[Any](), 0
        for point in reversed(points):
            wanted |= point.reads
            for run in reversed(runs):  # those that read what a unit makes come after it
                wanted |= run.reads if run.makes & wanted else 0
            self.least, choice = self._before(point, self.least, 1 << wanted.bit_length())
            self.choices.append(choice)
        self.choices.reverse()
        self.least = self._later(self.least, len(self.sets))

    def least_ns(self, kept: int) -> int | None:
        """V for the set ``kept``."""
        return int(self.least[kept]) if np.isfinite(self.least[kept]) else None

    def runs(self, kept: int) -> Runs:
        """The units that run in each stage on the cheapest way from ``kept``."""
        found = []
        for choice in self.choices:
            kept &= len(choice) - 1  # what comes later is not read any more
            units = []
            while (n := int(choice[kept])) >= 0:
                move = self.moves[n]
                kept = int(move.target[np.searchsorted(move.source, kept)]) & (len(choice) - 1)
                units += [] if move.unit is None else [move.unit]
            found.append(tuple(units))
        return tuple(found)

    def _later(self, after: Any, n: int) -> Any:
        """``after`` for the first ``n`` sets, where it has those of the blocks that still matter then."""
        return after[self.sets[:n] & (len(after) - 1)]

    def _before(self, point: Point, after: Any, n: int) -> tuple[Any, Any]:
        """V of the first ``n`` sets when the stage begins, from that when the next does, and the move to make
        (-1: the op runs).
        """
        value, sets = self._later(after, n), self.sets[:n]
        value[(sets & point.reads != point.reads) | (self.bytes[:n] + point.op_bytes > self.limit)] = np.inf
        choice = np.full(n, -1, dtype=np.int16)
        moves = [(m, self._possible(move, point.before_bytes, n)) for m, move in enumerate(self.moves)]
        changed = True
        while changed:
            changed = False
            for m, (source, target) in moves:
                ns = self.moves[m].cost_ns
                better = value[target] + ns < value[source]
                if better.any():
                    changed = True
                    value[source[better]] = value[target[better]] + ns
                    choice[source[better]] = m
        return value, choice

    def _possible(self, move: _Move, beside_bytes: int, n: int) -> tuple[Any, Any]:
        """From which of the first ``n`` sets to which; what is made and does not matter any more goes."""
        few = np.searchsorted(move.source, n)
        source, target = move.source[:few], move.target[:few] & (n - 1)
        if move.unit is None:
            return source, target
        can = self.bytes[source] + move.extra_bytes + beside_bytes <= self.limit
        return source[can], target[can]

    def _gone(self, n: int) -> _Move:
        source = self.sets[self.sets >> n & 1 == 1]
        return _Move(None, source, source & ~(1 << n), 0, 0)

    def _moves(self, run: Run) -> Iterator[_Move]:
        """What the unit reads stays, or goes as soon as no later part of the unit reads it."""
        can = (self.sets & run.reads == run.reads) & (self.sets & run.makes == 0)
        source = self.sets[can]
        yield _Move(
            run.unit, source, source | run.makes, run.cost_ns, max(own_bytes for _, own_bytes in run.steps)
        )
        if early := run.reads & ~run.steps[-1][0]:
            extra = max(own_bytes - int(self.bytes[early & ~inputs]) for inputs, own_bytes in run.steps)
            yield _Move(run.unit, source, (source | run.makes) & ~early, run.cost_ns, extra)
