"""What each segment of a chain may keep for its part of the backward pass, and what that takes.

A `Choice` keeps some of the blocks that the segment's stages read; the rest is made again from the block
that enters it, each at its first use, to stay to its last, or for each use anew, which takes less memory.
Segments that look alike (the layers of a transformer) have the same choices: those are found once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rematc.solve.decode import missing
from rematc.solve.reduce import Core
from rematc.solve.segments import Chain, Segment

MOST = 6  # choices of a segment


@dataclass(frozen=True, slots=True)
class Choice:
    """The blocks ``kept``, whether what is made again ``stays`` from use to use, and what follows.

    ``make_ns``: to run the segment from what enters it, up to what leaves it and what is kept;
    ``make_bytes`` are alive then at the most. ``again_ns``: what the stages make again. ``peak_bytes`` are
    alive while they run, resident ones and gradients included, what enters the segment not.
    """

    kept: frozenset[int]
    stays: bool
    kept_bytes: int
    make_ns: int
    make_bytes: int
    again_ns: int
    peak_bytes: int


def choices_of(chain: Chain) -> list[list[Choice]]:
    """For each segment its choices; the last keeps nothing."""
    known: dict[object, list[frozenset[int]]] = {}
    found = []
    for s, segment in enumerate(chain.segments):
        leaves = chain.segments[s + 1].enters if s + 1 < len(chain.segments) else None
        part = _Part(chain, segment, leaves)
        alike, number = part.shape()
        if alike not in known:
            known[alike] = [frozenset(number[b] for b in kept) for kept in _thinned(part)]
        block = {n: b for b, n in number.items()}
        sets = [frozenset(block[n] for n in kept) for kept in known[alike]]
        found.append([part.choice(kept, stays) for stays in (False, True) for kept in sets])
    return found


def _thinned(part: _Part) -> list[frozenset[int]]:
    """All blocks that the stages read, then fewer: next goes the one that is cheapest for its bytes."""
    size, kept = part.core.block_bytes, part.wanted
    steps, ns = [kept], part.again_ns(kept, stays=True)
    while kept:
        prices = {b: (part.again_ns(kept - {b}, stays=True) - ns) / max(1, size[b]) for b in kept}
        kept = kept - {min(kept, key=lambda b: (prices[b], b))}
        ns = part.again_ns(kept, stays=True)
        steps.append(kept)
    return [
        steps[i] for i in _corners([(sum(size[b] for b in k), part.again_ns(k, stays=True)) for k in steps])
    ]


def _corners(points: list[tuple[int, int]]) -> list[int]:
    """Of points with falling bytes and rising costs, the first, the last, and the best between."""
    inner = range(1, len(points) - 1)
    (most, low), (_, high) = points[0], points[-1]

    def below(i: int) -> float:  # the straight line from the first to the last
        saved, paid = most - points[i][0], points[i][1] - low
        return saved / max(1, most - points[-1][0]) - paid / max(1, high - low)

    best = sorted(inner, key=lambda i: (-below(i), i))[: MOST - 2]
    return sorted({0, *best, len(points) - 1})


class _Part:
    """One segment, and how its stages fare with what is kept."""

    def __init__(self, chain: Chain, segment: Segment, leaves: int | None) -> None:
        self.core: Core = chain.core
        self.segment, self.leaves = segment, leaves
        self.always_bytes = chain.always_bytes
        own = {b for u in segment.units for b in self.core.units[u].makes} - chain.always - self.core.held
        self.reads = [frozenset(own.intersection(self.core.stages[t].reads)) for t in segment.stages]
        self.wanted = frozenset[int]().union(*self.reads)
        entering = () if segment.enters is None else (segment.enters,)
        self.there = chain.always | self.core.held | frozenset(entering)
        self.last = {b: n for n, reads in enumerate(self.reads) for b in reads}

    def shape(self) -> tuple[object, dict[int, int]]:
        """What two segments have in common if their choices are alike, and its numbers of the blocks."""
        core, number = self.core, dict[int, int]()

        def name(b: int) -> int:
            return -1 if b in self.there else number.setdefault(b, len(number))

        units = [
            (tuple(map(name, unit.reads)), tuple(map(name, unit.makes)), unit.cost_ns, unit.workspace_bytes)
            for unit in (core.units[u] for u in self.segment.units)
        ]
        sizes = [core.block_bytes[b] for b in number]
        reads = [tuple(sorted(map(name, reads))) for reads in self.reads]
        return (tuple(units), tuple(sizes), tuple(reads)), number

    def choice(self, kept: frozenset[int], stays: bool) -> Choice:
        core = self.core
        leaving = () if self.leaves is None else (self.leaves,)
        units = missing(core, [*leaving, *sorted(kept)], self.there)
        return Choice(
            kept,
            stays,
            sum(core.block_bytes[b] for b in kept if b != self.leaves),
            sum(core.units[u].cost_ns for u in units),
            max((live for live, _ in self._burst(units, frozenset((*leaving, *kept)))), default=0),
            self.again_ns(kept, stays),
            max(self._stages(kept, stays), default=0),
        )

    def again_ns(self, kept: frozenset[int], stays: bool) -> int:
        return sum(self.core.units[u].cost_ns for runs, _ in self._again(kept, stays) for u in runs)

    def _again(self, kept: frozenset[int], stays: bool) -> Iterator[tuple[list[int], set[int]]]:
        """For each stage the units that run again, and the blocks that are there before."""
        there = set(kept)
        for n, reads in enumerate(self.reads):
            before = set(there)
            runs = missing(self.core, sorted(reads), self.there | there)
            if stays:
                there |= {b for u in runs for b in self.core.units[u].makes}
            there = {b for b in there if self.last.get(b, -1) > n}
            yield runs, before

    def _stages(self, kept: frozenset[int], stays: bool) -> Iterator[int]:
        """Bytes alive in each stage, while units run again, and while its op does."""
        size, core = self.core.block_bytes, self.core
        for n, (runs, before) in enumerate(self._again(kept, stays)):
            t = self.segment.stages[n]
            stage, base = core.stages[t], self.always_bytes[t]
            used = self.last if stays else dict.fromkeys(self.reads[n], n)
            left = frozenset(b for u in runs for b in core.units[u].makes if used.get(b, -1) >= n)
            held = base + sum(size[b] for b in before)
            yield from (stage.before_bytes + held + live for live, _ in self._burst(runs, left))
            yield stage.op_bytes + held + sum(size[b] for b in left - before)

    def _burst(self, runs: Iterable[int], stays: frozenset[int]) -> Iterator[tuple[int, int]]:
        """Bytes that each run finds alive of what the runs make, itself and its workspace included."""
        core, live, runs = self.core, 0, list(runs)
        made = {b for u in runs for b in core.units[u].makes}
        last = {b: n for n, u in enumerate(runs) for b in core.units[u].reads if b in made}
        for n, u in enumerate(runs):
            live += sum(core.block_bytes[b] for b in core.units[u].makes)
            yield live + core.units[u].workspace_bytes, u
            gone = {b for b in (*core.units[u].reads, *core.units[u].makes) if b in made and b not in stays}
            live -= sum(core.block_bytes[b] for b in gone if last.get(b, n) == n)
