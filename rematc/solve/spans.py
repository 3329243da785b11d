"""The backward pass cut into spans: runs of consecutive stages that the MILP sees as one.

A span begins where memory is tightest. Inside it the MILP knows what has run, not when, and counts
only what must be alive: fewer spans are a relaxation, and where it turns out to matter a stage gets
a span of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rematc.solve.reduce import Core


@dataclass(frozen=True)
class Spans:
    """Span k holds the stages from ``starts[k]`` up to the next start (``n_stages`` for the last).

    >>> spans = Spans((0, 3), 5)
    >>> spans.of(2), list(spans[1]), len(spans), spans.alone((1,)).starts
    (0, [3, 4], 2, (0, 1, 2, 3))
    """

    starts: tuple[int, ...]
    n_stages: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, k: int) -> range:
        return range(self.starts[k], self._ends[k])

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return (*self.starts[1:], self.n_stages)

    def of(self, stage: int) -> int:
        """The span that holds ``stage``."""
        return bisect_right(self.starts, stage) - 1

    def is_single(self, k: int) -> bool:
        """Does span k hold one stage alone?"""
        return len(self[k]) == 1

    def ended(self, start: int) -> Spans:
        """The same, but one span from stage ``start`` to the end."""
        return Spans((*(s for s in self.starts if s < start), start), self.n_stages)

    def alone(self, stages: Iterable[int]) -> Spans:
        """The same, each of ``stages`` in a span of its own."""
        cuts = {*self.starts, *(s for t in stages for s in (t, t + 1) if s < self.n_stages)}
        return Spans(tuple(sorted(cuts)), self.n_stages)


def every_stage(core: Core) -> Spans:
    """Each stage a span of its own."""
    return Spans(tuple(range(len(core.stages))), len(core.stages))


def tightest(core: Core) -> Spans:
    """To begin with: the stage whose op alone needs most, that which needs most if all is kept, and what
    is between the passes, each alone.
    """
    peaks = {load.index(max(load)) for load in loads(core)}
    between = {t for t, stage in enumerate(core.stages) if stage.is_between}
    return Spans((0,), len(core.stages)).alone(peaks | between)


def loads(core: Core) -> tuple[list[int], list[int]]:
    """Bytes while each stage's op runs: at the least, whatever the plan, and with all kept that is read.

    At the least there is what the op reads, and what is read later but can't be made again.
    """
    size = core.block_bytes
    once = {b for unit in core.units if unit.required and unit.pinned for b in unit.makes}
    least, kept, later = [], [], set[int]()
    once_bytes = later_bytes = 0
    for stage in reversed(core.stages):
        new = set(stage.reads) - later
        later |= new
        later_bytes += sum(size[b] for b in new)
        once_bytes += sum(size[b] for b in new & once)
        least.append(stage.op_bytes + once_bytes + sum(size[b] for b in stage.reads if b not in once))
        kept.append(stage.op_bytes + later_bytes)
    return least[::-1], kept[::-1]
