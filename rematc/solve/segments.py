"""A chain of segments: parts of forward, one after the other, each with its part of backward.

A segment's units read the blocks that cross into it, its own, and those that are *always* kept, because they
are read all over the graph (masks, position tables, an encoder's result) or made from all over it (a sum of
what each layer adds), can't be made twice, or are read in backward far from the segment's other blocks. The
last may be *lent* instead: kept until then only, and made again by their segment after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from rematc.solve.reduce import Core


@dataclass(frozen=True, slots=True)
class Segment:
    """Units, the blocks that cross into them, and the stages that read their blocks."""

    units: tuple[int, ...]
    enters: frozenset[int]
    stages: range

    @property
    def end(self) -> int:
        """The stage after its last one."""
        return self.stages.stop


@dataclass(frozen=True)
class Chain:
    """The segments of ``core``, in forward's order, and the blocks kept from forward to their last read.

    ``lent`` are blocks that are read far from their segment, too: kept from forward to the given stage, and
    made again by their segment after that.
    """

    core: Core
    segments: tuple[Segment, ...]
    always: frozenset[int]
    lent: tuple[tuple[int, int], ...] = ()

    @cached_property
    def needs_bytes(self) -> int:
        """Bytes of what is always kept, and of the largest segment: backward can do with no more."""
        units, size = self.core.units, self.core.block_bytes
        made = (sum(size[b] for u in s.units for b in units[u].makes) for s in self.segments)
        return self.kept_bytes + max(made)

    @cached_property
    def lowest_bytes(self) -> int:
        """An estimate of the lowest peak: the most that an op of backward needs beside what is always kept by
        then, or lent. A plan may free some of that sooner.
        """
        size, stages = self.core.block_bytes, self.core.stages
        own = ({*stage.reads} - self.there(t) - self.core.held for t, stage in enumerate(stages))
        read = (sum(size[b] for b in blocks) for blocks in own)
        needs = zip(stages, self.always_bytes, read, strict=True)
        return max(stage.op_bytes + always + own for stage, always, own in needs)

    @property
    def largest(self) -> int:
        """Units of the largest segment."""
        return max(len(segment.units) for segment in self.segments)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the blocks that are always kept, or lent."""
        return sum(self.core.block_bytes[b] for b in self.saved)

    @property
    def saved(self) -> frozenset[int]:
        """Blocks that forward keeps for all segments."""
        return self.always.union(b for b, _ in self.lent)

    def there(self, t: int) -> frozenset[int]:
        """Of those the ones that are there in stage t."""
        return self.always.union(b for b, until in self.lent if t <= until)

    @cached_property
    def always_bytes(self) -> list[int]:
        """Bytes of those that some stage from t on reads, far away, or remakes something from."""
        end = len(self.core.stages)
        last = {**_last_stage_that_matters(self), **dict(self.lent)}
        change = Counter[int]()
        for b in self.saved:
            change[last[b] + 1] -= self.core.block_bytes[b]
        return [self.kept_bytes + down for down in accumulate(change[t] for t in range(end))]


def joined(segments: Sequence[Segment]) -> Segment:
    """``segments``, each after the other, as one."""
    first, last = segments[0], segments[-1]
    units = tuple(u for segment in segments for u in segment.units)
    return Segment(tuple(sorted(units)), first.enters, range(last.stages.start, first.stages.stop))


def _last_stage_that_matters(chain: Chain) -> dict[int, int]:
    """For each block that is always kept, the last stage of a segment that reads it, in whichever pass."""
    core = chain.core
    last: dict[int, int] = dict.fromkeys(chain.always, -1)

    def use(blocks: Iterable[int], t: int) -> None:
        for b in blocks:
            if b in last:
                last[b] = max(last[b], t)

    for t, stage in enumerate(core.stages):
        use(stage.reads, t)
    for segment in chain.segments:
        if segment.stages:
            for u in segment.units:
                use(core.units[u].reads, segment.stages[-1])
    return last
