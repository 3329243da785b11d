"""Which sets of large blocks can be there, stage by stage, within a limit: exact, as sets of bit sets.

Tracked are some groups of blocks. Of all others no account is kept: they are at hand wherever they are read,
and take memory only then. So what can't be reached so can't be reached by any plan, in whatever order it
recomputes; what can is a plan if the others turn out to fit (the idea: abstraction refined by counterexample,
Clarke et al. 2000).

A group is there if one of its blocks is, and takes what its smallest block does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rematc.solve.reduce import Core

Group = tuple[int, ...]  # blocks, in the order of their making
Sets = Any  # of each set of groups, a bit for each, whether it is among them
Cut = tuple[Any, ...]  # an index: the sets with some groups there, and some not


@dataclass(frozen=True, slots=True)
class _Move:
    """Unit ``unit`` makes the groups ``makes`` (bits): from the sets ``source`` to the sets ``result``."""

    unit: int
    makes: int
    source: Cut
    result: Cut
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Stop:
    """A stage of a path: the groups there when it begins, and the units of tracked blocks that run in it."""

    there: tuple[int, ...]
    units: tuple[int, ...]


class Space:
    """All sets of ``groups`` in the ``stages`` of ``core``; any of them may be there when the first begins.

    >>> core = Core((8, 8), ((0,), (1,)), (), (), frozenset(), 0)
    >>> Space(core, [(0,), (1,)], range(0)).path(0)
    {}
    """

    def __init__(self, core: Core, groups: Sequence[Group], stages: range) -> None:
        self.core, self.groups, self.stages = core, groups, stages
        self.bit = {b: n for n, group in enumerate(groups) for b in group}
        self.names = np.arange(1 << len(groups))
        self.bytes = np.zeros(1 << len(groups), dtype=np.int64)
        for n, least in enumerate(self._least):
            self.bytes[(self.names >> n) & 1 == 1] += least

    def path(self, limit_bytes: int) -> dict[int, Stop] | None:
        """A way through the stages within ``limit_bytes`` that has little there; None if there is none."""
        begun = self._begun(limit_bytes)
        if begun is None:
            return None
        goal, stops = 0, {}
        for t in reversed(self.stages):
            stops[t], goal = self._back(t, begun[t], goal, limit_bytes)
        return stops

    def _begun(self, limit_bytes: int) -> dict[int, Sets] | None:
        """The sets that can be there when each stage begins; with a set, all that it includes."""
        sets, begun = np.ones(len(self.names), dtype=bool), {}
        cube = self._cube(sets)
        closed_bytes: int | None = None  # that many were alive beside, when no move led any further
        for t in self.stages:
            stage = self.core.stages[t]
            sets &= self.bytes + stage.before_bytes <= limit_bytes
            begun[t] = sets.copy()
            if not stage.is_between and (closed_bytes is None or stage.before_bytes < closed_bytes):
                self._close(cube, limit_bytes - stage.before_bytes)
                closed_bytes = stage.before_bytes
            before = np.count_nonzero(sets)
            sets &= self._ends(t, limit_bytes)
            if not sets.any():
                return None
            self._drop(cube)
            if np.count_nonzero(sets) < before:
                closed_bytes = None
        return begun

    def _back(self, t: int, begun: Sets, goal: int, limit_bytes: int) -> tuple[Stop, int]:
        """How stage ``t`` can end with ``goal``, from the smallest set there that it can begin with."""
        if goal == 0 and not any(b in self.bit for b in self.core.stages[t].reads):
            return Stop((), ()), 0
        beside = self.core.stages[t].before_bytes
        within = self.bytes + beside <= limit_bytes
        sets = self._ends(t, limit_bytes) & (self.names & goal == goal) & within
        step = np.zeros(len(self.names), dtype=np.int32)  # n + 1: move n; -(n + 1): group n goes; 0: the end
        cube, steps, allowed, sizes = map(self._cube, (sets, step, within, self.bytes))

        def gone() -> None:
            for n, (low, high) in enumerate(self._sides):
                new = cube[low] & allowed[high] & ~cube[high]
                if new.any():
                    steps[high][new] = -(n + 1)
                    cube[high] |= new

        gone()
        more = not self.core.stages[t].is_between
        while more:
            more = False
            for n, move in enumerate(self._moves):
                fits = sizes[move.result] <= limit_bytes - beside - move.extra_bytes
                new = cube[move.result] & fits & ~cube[move.source]
                if new.any():
                    more = True
                    steps[move.source][new] = n + 1
                    cube[move.source] |= new
                    gone()
        possible = np.flatnonzero(sets & begun)
        first = int(possible[np.argmin(self.bytes[possible])])
        return Stop(self._members(first), self._units(first, step)), first

    def _units(self, at: int, step: Any) -> tuple[int, ...]:
        """The units that run on the way from the set ``at``."""
        units = []
        while step[at]:
            n = int(step[at])
            if n < 0:
                at &= ~(1 << (-n - 1))
            else:
                units.append(self._moves[n - 1].unit)
                at |= self._moves[n - 1].makes
        return tuple(units)

    def _close(self, cube: Sets, room_bytes: int) -> None:
        """Add the sets that recomputation leads to."""
        sizes, more = self._cube(self.bytes), True
        while more:
            more = False
            for move in self._moves:
                fits = sizes[move.result] <= room_bytes - move.extra_bytes
                new = cube[move.source] & fits & ~cube[move.result]
                if new.any():
                    more = True
                    cube[move.result] |= new
                    self._drop(cube)

    def _drop(self, cube: Sets) -> None:
        """Whatever is there may go."""
        for low, high in self._sides:
            cube[low] |= cube[high]

    def _ends(self, t: int, limit_bytes: int) -> Sets:
        """The sets with which the op of stage ``t`` can run."""
        stage = self.core.stages[t]
        read = sum(1 << n for n in {self.bit[b] for b in stage.reads if b in self.bit})
        used = stage.op_bytes + sum(self._beside(b) for b in stage.reads)
        return (self.names & read == read) & (self.bytes + used <= limit_bytes)

    def _beside(self, block: int) -> int:
        """What a block takes, beside what is counted for its group, while it is read or made."""
        size = 0 if block in self.core.held else self.core.block_bytes[block]
        return size - self._least[self.bit[block]] if block in self.bit else size

    @cached_property
    def _least(self) -> list[int]:
        return [min(self.core.block_bytes[b] for b in group) for group in self.groups]

    @cached_property
    def _moves(self) -> list[_Move]:
        return [move for u in range(len(self.core.units)) if (move := self._move(u)) is not None]

    def _move(self, u: int) -> _Move | None:
        unit = self.core.units[u]
        reads = {self.bit[b] for b in unit.reads if b in self.bit}
        makes = {self.bit[b] for b in unit.makes if b in self.bit} - reads
        if (unit.pinned and unit.required) or not makes:  # else it may run late, once
            return None
        extra = unit.workspace_bytes + sum(self._beside(b) for b in (*unit.reads, *unit.makes))
        there = dict.fromkeys(reads, 1)
        source, result = (
            self._cut({**there, **dict.fromkeys(makes, 0)}),
            self._cut(there | dict.fromkeys(makes, 1)),
        )
        return _Move(u, sum(1 << n for n in makes), source, result, extra)

    @cached_property
    def _sides(self) -> list[tuple[Cut, Cut]]:
        """Of each group, the sets without it and those with it."""
        return [(self._cut({n: 0}), self._cut({n: 1})) for n in range(len(self.groups))]

    def _cut(self, there: dict[int, int]) -> Cut:
        last = len(self.groups) - 1
        return (*(there.get(last - axis, slice(None)) for axis in range(last + 1)), ...)

    def _cube(self, sets: Any) -> Any:
        return sets.reshape([2] * len(self.groups))

    def _members(self, at: int) -> tuple[int, ...]:
        return tuple(n for n in range(len(self.groups)) if at >> n & 1)
