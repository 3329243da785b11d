"""What each segment of a chain may keep for its part of the backward pass, and what that takes.

A `Choice` keeps some of the blocks that the segment's stages read; the rest is made again from the blocks
that enter it. Where the segment has few blocks, `Ways` says how that is cheapest within a limit, for some
limits. Besides, each block is made at its first use, to stay to its last, or for each use anew, which takes
less memory. Segments that look alike (the layers of a transformer) have the same choices: those are found
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rematc.solve.burst import Burst
from rematc.solve.decode import missing
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core
from rematc.solve.segments import Chain, Segment, joined
from rematc.solve.within import MOST, Point, Run, Runs, Ways

CORNERS = 20  # of the sets that are worth keeping
LIMITS = 6
KNOWN = 4  # graphs whose windows are kept
WIDEST, WIDE, MANY = 3, 2, 64  # segments in a window, and where a chain has many

Way = tuple[frozenset[int], Runs]  # the blocks kept, and the units that run in each stage


@dataclass(frozen=True, slots=True)
class Choice:
    """The blocks ``kept``, the units that each stage ``runs`` again, and what follows.

    ``make_ns``: to run the segment from what enters it, up to what leaves it and what is kept; ``first_ns``:
    the same in forward, which runs most of it anyway. ``make_bytes`` are alive then at the most.
    ``again_ns``: what the stages make again. ``peak_bytes`` are alive while they run, resident ones and
    gradients included, what enters the segment not.
    """

    kept: frozenset[int]
    runs: Runs
    kept_bytes: int
    make_ns: int
    first_ns: int
    make_bytes: int
    again_ns: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Window:
    """Some segments, one after the other, taken as one, and what that may keep: nothing comes last."""

    length: int
    segment: Segment
    choices: list[Choice]


@lru_cache(maxsize=KNOWN)
def windows_of(merged: Merged, chain: Chain) -> tuple[tuple[Window, ...], ...]:
    """By the segment that they begin with: it alone, then with those after it, up to `MOST` blocks.

    No budget has a part in it, so the next search for the same graph finds them.
    """
    burst, known = Burst(merged), dict[object, list[Way]]()
    return tuple(tuple(_windows(burst, chain, s, known)) for s in range(len(chain.segments)))


def _windows(burst: Burst, chain: Chain, s: int, known: dict[object, list[Way]]) -> Iterator[Window]:
    widest = WIDEST if len(chain.segments) <= MANY else WIDE
    for length in range(1, min(widest, len(chain.segments) - s) + 1):
        segments = chain.segments[s : s + length]
        after = chain.segments[s + length : s + length + 1]
        part = _Part(burst, chain, joined(segments), after[0].enters if after else frozenset())
        if length > 1 and len(part.own) > MOST:
            return
        yield Window(length, part.segment, _choices(part, known))


def _choices(part: _Part, known: dict[object, list[Way]]) -> list[Choice]:
    alike, number = part.shape()
    units = part.segment.units
    if alike not in known:
        known[alike] = [
            (frozenset(number[b] for b in kept), _placed(runs, units.index)) for kept, runs in part.ways()
        ]
    block = {n: b for b, n in number.items()}
    ways = (
        (frozenset(block[n] for n in kept), _placed(runs, units.__getitem__)) for kept, runs in known[alike]
    )
    return _undominated([part.choice(way) for way in ways])


def _undominated(choices: list[Choice]) -> list[Choice]:
    """Those that no other is as good as in all respects; the last, which keeps nothing, stays."""
    *others, last = dict.fromkeys(choices)
    numbers = np.array([_numbers(c) for c in (*others, last)])
    no_worse = (numbers[:, None] <= numbers[None, :]).all(axis=2)
    better = no_worse & (~no_worse.T | np.tri(len(numbers), k=-1, dtype=bool).T)  # of equal ones the first
    return [c for c, worse in zip(others, better.any(axis=0), strict=False) if not worse] + [last]


def _numbers(c: Choice) -> tuple[int, ...]:
    return c.kept_bytes, c.make_ns, c.first_ns, c.make_bytes, c.again_ns, c.peak_bytes


def _placed(runs: Runs, place: Callable[[int], int]) -> Runs:
    return tuple(tuple(map(place, units)) for units in runs)


def _thinned(part: _Part) -> list[frozenset[int]]:
    """All blocks that the stages read, then fewer: next goes the one that is cheapest for its bytes."""
    size, kept = part.core.block_bytes, part.wanted
    steps, ns = [kept], part.again_ns(part.again(kept, stays=True))
    while kept:
        prices = {b: (part.again_ns(part.again(kept - {b}, stays=True)) - ns) / max(1, size[b]) for b in kept}
        kept = kept - {min(kept, key=lambda b: (prices[b], b))}
        ns = part.again_ns(part.again(kept, stays=True))
        steps.append(kept)
    points = [(sum(size[b] for b in k), part.again_ns(part.again(k, stays=True))) for k in steps]
    return [steps[i] for i in _corners(points)]


def _corners(points: list[tuple[int, int]]) -> list[int]:
    """Of points with falling bytes and rising costs, the first, the last, and the best between."""
    inner = range(1, len(points) - 1)
    (most, low), (_, high) = points[0], points[-1]

    def below(i: int) -> float:  # the straight line from the first to the last
        saved, paid = most - points[i][0], points[i][1] - low
        return saved / max(1, most - points[-1][0]) - paid / max(1, high - low)

    best = sorted(inner, key=lambda i: (-below(i), i))[: CORNERS - 2]
    return sorted({0, *best, len(points) - 1})


class _Part:
    """One segment, and how its stages fare with what is kept."""

    def __init__(self, burst: Burst, chain: Chain, segment: Segment, leaves: frozenset[int]) -> None:
        self.core: Core = chain.core
        self.burst, self.segment, self.leaves = burst, segment, leaves
        self.always_bytes = chain.always_bytes
        made = frozenset(b for u in segment.units for b in self.core.units[u].makes)
        self.own = own = made - chain.always - self.core.held
        self.reads = [frozenset(own.intersection(self.core.stages[t].reads)) for t in segment.stages]
        self.wanted = frozenset[int]().union(*self.reads)
        lent = chain.there(segment.stages.start) - own  # to others: of some segments, one lends to the next
        self.there = lent | self.core.held | segment.enters
        self.last = {b: n for n, reads in enumerate(self.reads) for b in reads}

    def shape(self) -> tuple[object, dict[int, int]]:
        """What two segments have in common if their choices are alike, and its numbers of the blocks."""
        core, number = self.core, dict[int, int]()

        def name(b: int) -> int:
            return -1 if b in self.there else number.setdefault(b, len(number))

        units = [
            (tuple(map(name, unit.reads)), tuple(map(name, unit.makes)), unit.cost_ns, steps)
            for unit, steps in ((core.units[u], self._named(u, name)) for u in self.segment.units)
        ]
        sizes = [core.block_bytes[b] for b in number]
        reads = [tuple(sorted(map(name, reads))) for reads in self.reads]
        leaves = tuple(sorted(map(name, self.leaves)))
        return (tuple(units), tuple(sizes), tuple(reads), leaves), number

    def _named(self, u: int, name: Callable[[int], int]) -> tuple[object, ...]:
        return tuple(
            (tuple(map(name, sorted(inputs))), own_bytes) for inputs, own_bytes in self.burst.steps[u]
        )

    def ways(self) -> list[Way]:
        """The ways worth a thought; those that keep nothing come last."""
        sets = _thinned(self)
        plain = [(kept, self.again(kept, stays)) for stays in (False, True) for kept in sets]
        found = plain[::-1] if len(self.own) > MOST else [*self._cheapest(plain), *plain]
        return sorted(dict.fromkeys(found), key=lambda way: not way[0])

    def _cheapest(self, plain: list[Way]) -> Iterator[Way]:
        """For limits that the ``plain`` ways need, from the lowest on, the sets for which less is dearer."""
        core, blocks = self.core, sorted(self.own)
        size = [core.block_bytes[b] for b in blocks]
        kept_bytes = np.zeros(1 << len(blocks), dtype=np.int64)
        for n, b in enumerate(blocks):
            if b not in self.leaves:
                kept_bytes[np.arange(1 << len(blocks)) >> n & 1 == 1] += size[n]
        peaks = sorted({max(self._live(runs), default=0) for _, runs in plain})
        for limit in peaks[:: -(-len(peaks) // LIMITS)]:
            ways = Ways(size, self._runs(blocks), self._points(blocks), limit)
            best = np.lexsort((ways.least, kept_bytes))
            falling = np.minimum.accumulate(np.concatenate(([np.inf], ways.least[best][:-1])))
            front = best[ways.least[best] < falling]
            points = [(int(kept_bytes[k]), int(ways.least[k])) for k in reversed(front)]
            for i in _corners(points) if len(points) > 1 else range(len(points)):
                k = int(front[len(front) - 1 - i])
                yield frozenset(b for n, b in enumerate(blocks) if k >> n & 1), ways.runs(k)

    def _runs(self, blocks: list[int]) -> list[Run]:
        def bits(these: Iterable[int]) -> int:
            return sum(1 << n for n, b in enumerate(blocks) if b in set(these))

        units = ((u, self.core.units[u]) for u in self.segment.units if not self.core.units[u].pinned)
        return [
            Run(
                u,
                bits(unit.reads),
                bits(unit.makes),
                unit.cost_ns,
                tuple((bits(inputs), own_bytes) for inputs, own_bytes in self.burst.steps[u]),
            )
            for u, unit in units
            if self.own.intersection(unit.makes)
        ]

    def _points(self, blocks: list[int]) -> list[Point]:
        points = []
        for t, reads in zip(self.segment.stages, self.reads, strict=True):
            stage, always = self.core.stages[t], self.always_bytes[t]
            bits = sum(1 << n for n, b in enumerate(blocks) if b in reads)
            points.append(Point(bits, stage.before_bytes + always, stage.op_bytes + always))
        return points

    def choice(self, way: Way) -> Choice:
        core, (kept, runs) = self.core, way
        units = missing(core, [*sorted(self.leaves), *sorted(kept)], self.there)
        return Choice(
            kept,
            runs,
            sum(core.block_bytes[b] for b in kept if b not in self.leaves),
            sum(core.units[u].cost_ns for u in units),
            sum(core.units[u].cost_ns for u in units if not core.units[u].required),
            max(self.burst.live(units, self.leaves | kept, self.own), default=0),
            self.again_ns(runs),
            max(self._live(runs), default=0),
        )

    def again_ns(self, runs: Runs) -> int:
        """What all ``runs`` take."""
        return sum(self.core.units[u].cost_ns for units in runs for u in units)

    def again(self, kept: frozenset[int], stays: bool) -> Runs:
        """For each stage the units that run again, so that what it reads is there."""
        there, found = set(kept), []
        for n, reads in enumerate(self.reads):
            runs = missing(self.core, sorted(reads), self.there | there)
            if stays:
                there |= {b for u in runs for b in self.core.units[u].makes}
            there = {b for b in there if self.last.get(b, -1) > n}
            found.append(tuple(runs))
        return tuple(found)

    def _live(self, runs: Runs) -> Iterator[int]:
        """Bytes alive in each stage, from the last one on, while units run again, and while its op does."""
        size, wanted = self.core.block_bytes, set[int]()
        for n in reversed(range(len(runs))):
            t = self.segment.stages[n]
            stage, always = self.core.stages[t], self.always_bytes[t]
            wanted |= self.reads[n]
            yield stage.op_bytes + always + sum(size[b] for b in wanted)
            before = stage.before_bytes + always
            yield from (before + live for live in self.burst.live(runs[n], wanted, self.own))
            for u in reversed(runs[n]):
                wanted.difference_update(self.core.units[u].makes)
                wanted |= self.own.intersection(self.core.units[u].reads)
