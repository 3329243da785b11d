"""Which sets of large blocks can be there, stage by stage, within a limit: exact, as families of sets.

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
from rematc.solve.subsets import Family, Part, Subsets

Group = tuple[int, ...]  # blocks, in the order of their making


@dataclass(frozen=True, slots=True)
class _Move:
    """Unit ``unit`` makes the groups of the subset ``makes``: from sets in ``source`` to sets in ``result``.

    ``needs_bytes``: in each word of ``result``, what it takes beside the groups within the word.
    """

    unit: int
    makes: int
    source: Part
    result: Part
    needs_bytes: Any


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
        self.least_bytes = [min(core.block_bytes[b] for b in group) for group in groups]
        self.of = Subsets(self.least_bytes)
        # A unit that writes in place leaves more than it needs, for a moment: both what it read and made.
        self.over_bytes = max((0, *(-unit.workspace_bytes for unit in core.units)))

    def path(self, limit_bytes: int) -> dict[int, Stop] | None:
        """A way through the stages within ``limit_bytes`` that has little there; None if there is none."""
        begun = self._begun(limit_bytes)
        if begun is None:
            return None
        goal, stops = 0, {}
        for t in reversed(self.stages):
            stops[t], goal = self._back(t, begun[t], goal, limit_bytes)
        return stops

    def _begun(self, limit_bytes: int) -> dict[int, Family] | None:
        """The sets that can be there when each stage begins; with a set, all that it includes."""
        sets, begun = self.of.all(), {}
        closed_bytes: int | None = None  # that many were alive beside, when no move led any further
        for t in self.stages:
            stage = self.core.stages[t]
            fits = self.of.within(limit_bytes - stage.before_bytes)
            if (sets & ~fits).any():  # an op that wrote in place left more than it needed
                closed_bytes = None
            sets &= fits
            begun[t] = sets.copy()
            if not stage.is_between and (closed_bytes is None or stage.before_bytes < closed_bytes):
                self._close(sets, limit_bytes - stage.before_bytes)
                closed_bytes = stage.before_bytes
            ended = self._ends(t, sets, limit_bytes)
            if not ended.any():
                return None
            if (sets & ~ended).any():
                closed_bytes = None
            sets = ended
            self.of.drop(sets)
        return begun

    def _back(self, t: int, begun: Family, goal: int, limit_bytes: int) -> tuple[Stop, int]:
        """How stage ``t`` can end with ``goal``, from the smallest set there that it can begin with."""
        if goal == 0 and not any(b in self.bit for b in self.core.stages[t].reads):
            return Stop((), ()), 0
        room_bytes = limit_bytes - self.core.stages[t].before_bytes
        within, steps = self.of.within(room_bytes + self.over_bytes), list[tuple[_Move | int, Family]]()
        sets = self._ends(t, self.of.within(room_bytes), limit_bytes)
        sets = self.of.keep(sets, self.of.part(dict.fromkeys(self.of.members(goal), True)))

        def before(step: _Move | int, new: Family) -> bool:
            nonlocal sets
            new = new & ~sets
            if new.any():
                steps.append((step, new))
                sets |= new
                return True
            return False

        def gone() -> None:
            for n in range(len(self.groups)):
                before(n, self.of.with_group(sets, n) & within)

        gone()
        more = not self.core.stages[t].is_between
        while more:
            more = False
            for move in self._moves:
                if before(move, self._unmade(move, sets, room_bytes)):
                    more = True
                    gone()
        first = self.of.smallest(sets & begun)
        return Stop(self.of.members(first), self._units(first, steps)), first

    def _units(self, at: int, steps: list[tuple[_Move | int, Family]]) -> tuple[int, ...]:
        """The units that run on the way from the set ``at``; what a step leads to was found before it."""
        units = []
        for step, sets in reversed(steps):
            if not self.of.has(sets, at):
                continue
            if isinstance(step, int):
                at &= ~(1 << step)
            else:
                units.append(step.unit)
                at |= step.makes
        return tuple(units)

    def _close(self, sets: Family, room_bytes: int) -> None:
        """Add the sets that recomputation leads to."""
        more = True
        while more:
            more = False
            for move in self._moves:
                new = self._made(move, sets, room_bytes)
                if new is not None:
                    more = True
                    sets[move.result.cut] |= new
                    self.of.drop(sets)

    def _made(self, move: _Move, sets: Family, room_bytes: int) -> Family | None:
        """What a move adds to ``sets``, in the words of its results; None if nothing."""
        source = sets[move.source.cut] & move.source.mask
        new = (source << np.uint64(move.makes & 63)) & ~sets[move.result.cut]
        (words,) = np.nonzero(new.ravel())
        if not len(words):
            return None
        flat = new.reshape(-1)
        flat[words] &= self.of.places(room_bytes - move.needs_bytes[words])
        return flat.reshape(new.shape) if flat.any() else None

    def _unmade(self, move: _Move, sets: Family, room_bytes: int) -> Family:
        """The sets from which a move leads to ``sets``."""
        result = sets[move.result.cut] & move.result.mask
        fits = self.of.places(room_bytes - move.needs_bytes).reshape(result.shape)
        found = np.zeros_like(sets)
        found[move.source.cut] = (result & fits) >> np.uint64(move.makes & 63)
        return found

    def _ends(self, t: int, sets: Family, limit_bytes: int) -> Family:
        """The ``sets`` with which the op of stage ``t`` can run."""
        stage = self.core.stages[t]
        read = self.of.part({self.bit[b]: True for b in stage.reads if b in self.bit})
        used = stage.op_bytes + sum(self._beside(b) for b in stage.reads)
        return self.of.keep(sets & self.of.within(limit_bytes - used), read)

    def _beside(self, block: int) -> int:
        """What a block takes, beside what is counted for its group, while it is read or made."""
        size = 0 if block in self.core.held else self.core.block_bytes[block]
        return size - self.least_bytes[self.bit[block]] if block in self.bit else size

    @cached_property
    def _moves(self) -> list[_Move]:
        return [move for u in range(len(self.core.units)) if (move := self._move(u)) is not None]

    def _move(self, u: int) -> _Move | None:
        unit = self.core.units[u]
        reads = {self.bit[b] for b in unit.reads if b in self.bit}
        makes = {self.bit[b] for b in unit.makes if b in self.bit} - reads
        if (unit.pinned and unit.required) or not makes:  # else it may run late, once
            return None
        there = dict.fromkeys(reads, True)
        source, result = (
            self.of.part({**there, **dict.fromkeys(makes, is_made)}) for is_made in (False, True)
        )
        extra = unit.workspace_bytes + sum(self._beside(b) for b in (*unit.reads, *unit.makes))
        needs = self.of.high_bytes[result.cut].ravel() + extra
        return _Move(u, sum(1 << n for n in makes), source, result, needs)
