"""From the tables of `prefix` to plans that they say.

Which sets of blocks the segments hold is read off from the last one to the first: a `Holder` is a segment
and those before it. Then all is played from the first stage to the last. Where a prefix is asked several
times, the tables say what holds for any plan, not what one does: it can go over to what it holds at last the
first time, or the last time. All combinations of that are drafts, which can need more than the budget: the
tables don't count all of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from rematc.solve.back import Back, Step
from rematc.solve.expand import Draft
from rematc.solve.part import Table
from rematc.solve.reduce import Core
from rematc.solve.segments import Chain

Kind = Literal["rest", "once", "more", "mid"]  # of the tables of `Back`
Place = tuple[Kind, int]  # in them: a table, and a set
AFTER: dict[Kind, tuple[Kind, ...]] = {  # the prefix is asked
    "rest": (),
    "once": ("rest",),
    "more": ("mid",),
    "mid": ("rest", "mid"),
}
SEVERAL = 4  # prefixes that are asked several times: there are 16 combinations


class _Point(NamedTuple):
    """The tables at a moment, for what the prefix holds on this way, and the room for what comes next."""

    values: dict[Kind, Table]
    room: float


@dataclass(frozen=True)
class Holder:
    """The prefix that ends with the segment of ``way``, and the one before it.

    At first it has the set ``first`` of its blocks. Asked for what leaves it, it goes over to another, as
    ``step`` says, if there is one. Over its own stages it goes as the tables ``kind`` say, with levels
    ``now`` and ``then`` held before it.
    """

    way: Back
    first: int
    kind: Kind
    now: int
    then: int
    before: Holder | None
    step: Step | None = None

    @cached_property
    def points(self) -> list[tuple[_Point, _Point]]:
        """For what runs before the first stage, and for each stage: the tables before, and for its op."""
        part = self.way.part
        way = Back(part, self.way.prefix, np.array([self.now]), np.array([self.then]))
        after, found = _point(way, math.inf), list[tuple[_Point, _Point]]()
        for t in reversed(part.segment.stages):
            room = part.limit - part.core.stages[t].before_bytes
            way.over(part.core.stages[t])
            end = _point(way, room)
            way.run(room)
            after = _point(way, room)
            found.append((after, end))
        way.run(math.inf)
        return [(_point(way, math.inf), after), *reversed(found)]

    def everyone(self) -> Iterator[Holder]:
        """It, and those before it."""
        yield self
        if self.before:
            yield from self.before.everyone()


def drafts(core: Core, chain: Chain, ways: list[Back]) -> Iterator[Draft]:
    """What the tables of all segments say, with prefixes that go over early, or late."""
    holders = list(_to_go_back(ways, ways[-1].part.n_levels - 1).everyone())
    late = _Play(core, holders)
    found = {late.draft(chain.saved)}
    yield from found
    several = sorted(late.waited)[:SEVERAL]
    for k in range(1, len(several) + 1):
        for early in combinations(several, k):
            draft = _Play(core, holders, early).draft(chain.saved)
            if draft not in found:
                found.add(draft)
                yield draft


class _Play:
    """The plan of ``holders``, stage by stage. Those that are ``early`` go over the first time that they are
    asked; ``waited`` are those that could have.
    """

    def __init__(self, core: Core, holders: list[Holder], early: Sequence[int] = ()) -> None:
        self.core, self.holders, self.early = core, holders, early
        self.waited = set[int]()
        self.at_hand = [holder.first for holder in holders]
        self.steps = [holder.step for holder in holders]
        self.runs: list[list[int]] = [[] for _ in core.stages]

    def draft(self, always: frozenset[int]) -> Draft:
        """With the blocks ``always`` saved, too."""
        saved = {b for holder in self.holders for b in holder.way.part.blocks_of(holder.first)} | always
        for n in range(len(self.holders)):
            self._go_back(n)
        return Draft(frozenset(saved) - self.core.held, tuple(map(tuple, self.runs)))

    def _go_back(self, n: int) -> None:
        """Over the own stages of the holder ``n``."""
        holder = self.holders[n]
        stages, kind = holder.way.part.segment.stages, holder.kind
        for i, (begin, end) in enumerate(holder.points):
            t = stages[max(0, i - 1)] if stages else stages.start
            for place, unit in _path(holder, (kind, self.at_hand[n]), begin, end) or ():
                if unit is not None:
                    self.runs[t].append(unit)
                elif place[1] > self.at_hand[n]:
                    self._ask(n + 1, t, is_last=place[0] == "rest")
                kind, self.at_hand[n] = place

    def _ask(self, n: int, t: int, is_last: bool) -> None:
        """What leaves the holder ``n`` is made in stage ``t``."""
        step, goal = self.steps[n], self.at_hand[n]
        if step and (is_last or n in self.early):
            goal, self.steps[n] = step.after, None
        elif step:
            self.waited.add(n)
        self._make(n, goal, t, is_last)
        self.at_hand[n] = goal

    def _make(self, n: int, goal: int, t: int, is_last: bool) -> None:
        """What leaves the holder, and what is not at hand of the set ``goal``."""
        holder, there = self.holders[n], self.at_hand[n]
        part, units = holder.way.part, list[int]()
        need = (part.leaving | goal) & ~there
        for u, run in zip(reversed(part.segment.units), reversed(part.runs), strict=True):
            if need & run.makes:
                units.append(u)
                need |= run.reads & ~there
        if need & 1 and part.asks:
            self._ask(n + 1, t, is_last and holder.kind == "rest")
        self.runs[t] += reversed(units)


def _to_go_back(ways: list[Back], level: int) -> Holder:
    """What costs ``back[level]``."""
    way, part = ways[-1], ways[-1].part
    fits = part.levels <= (level - part.full)[:, None]
    s, held = _least(np.where(fits, way.every, np.inf))
    return _holder(ways, s, held)


def _holder(ways: list[Back], s: int, held: int, step: Step | None = None) -> Holder:
    """With the set ``s`` at hand (after ``step``, if there is one), and ``held`` levels before it."""
    way, rest = ways[-1], ways[:-1]
    first = step.before if step else s
    if not rest or way.rest[s, held] + way.prefix.back[held] <= way.every[s, held]:
        return Holder(way, first, "rest", held, held, _to_go_back(rest, held) if rest else None, step)
    once = way.once[s, held] + way.prefix.again[held]
    kind: Kind = "once" if once.min() <= way.every[s, held] else "more"
    then = int(np.argmin(once if kind == "once" else way.more[s, held] + way.prefix.again[held]))
    return Holder(way, first, kind, held, then, _to_be_asked(rest, held, then), step)


def _to_be_asked(ways: list[Back], b: int, c: int) -> Holder:
    """What costs ``again[b, c]``."""
    way, full = ways[-1], ways[-1].part.full
    best, found = math.inf, None
    for step in way.steps():
        rows, columns = b - full[step.before] + 1, c - full[step.after] + 1
        if rows <= 0 or columns <= 0:
            continue
        open_ = step.later[:rows, :columns] if step.asks else step.later[: min(rows, columns)]
        if float(open_.min() + step.ns) < best:
            best, found = float(open_.min() + step.ns), (step, _least(open_))
    assert found
    step, at = found
    if not step.asks:
        return _holder(ways, step.after, at[0], step)
    now, then = at
    kind: Kind = "rest"
    if way.prefix.again[now, then] + way.rest[step.after, then] > step.later[now, then]:
        kind, then = "mid", int(np.argmin(way.mid[step.after] + way.prefix.again[now]))
    return Holder(way, step.before, kind, now, then, _to_be_asked(ways[:-1], now, then), step)


def _least(table: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in np.unravel_index(int(np.argmin(table)), table.shape))


def _point(way: Back, room: float) -> _Point:
    one = {"rest": way.rest[:, 0], "mid": way.mid[:, 0], "once": way.once[:, 0, 0], "more": way.more[:, 0, 0]}
    return _Point({kind: values.copy() for kind, values in one.items()}, room)  # type: ignore[misc]


def _path(holder: Holder, start: Place, begin: _Point, end: _Point) -> list[tuple[Place, int | None]] | None:
    """The cheapest way from ``start`` to where the stage's op can run, from place to place, and what runs.

    None if there is none: not all has gone as the tables said. What is missing is made again, then.
    """
    stack, seen = [(start, list[tuple[Place, int | None]]())], {start}
    while stack:
        (kind, s), way = stack.pop()
        if begin.values[kind][s] >= end.values[kind][s]:
            return way
        for place, unit, ns in reversed(list(_moves(holder, (kind, s), begin.room))):
            other, left = place
            if place not in seen and begin.values[other][left] + ns <= begin.values[kind][s]:
                seen.add(place)
                stack.append((place, [*way, (place, unit)]))
    return None


def _moves(holder: Holder, place: Place, room: float) -> Iterator[tuple[Place, int | None, float]]:
    """What can be done at ``place``: a unit runs, the prefix before is asked, a block goes."""
    part, (kind, s) = holder.way.part, place
    held = {"rest": holder.then, "mid": 0, "once": holder.now, "more": holder.now}[kind] * part.level_bytes
    for u, run in zip(part.segment.units, part.runs, strict=True):
        reads, makes = run.reads & part.sets[-1], run.makes & part.sets[-1]
        size = part.bytes[s & ~makes] + run.own_bytes + held
        if s & reads == reads and s & makes != makes and size <= room:
            yield (kind, int(s | makes)), u, run.cost
    if part.asks and not s & 1:
        for other in AFTER[kind]:
            yield (other, s | 1), None, part.ask if other == "mid" else 0
    for n in range(len(part.blocks)):
        if s >> n & 1:
            yield (kind, s & ~(1 << n)), None, 0
