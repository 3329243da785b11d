"""Core -> chain of segments: forward is cut wherever a single block crosses, and backward with it.

Between two cuts lies a segment: its units read the block that crosses into it, its own blocks, and those that
are *always* kept, because they are read all over the graph (masks, position tables, an encoder's result), can't be
made twice, or are read in backward far from the segment's other blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from rematc.solve.reduce import Core

MOST = 200  # segments; more would make their number's square too large
SPANS = (8, 16, 32, 64)  # parts of forward: a block that is read over more than one is kept
FEW = 3  # a chain has at least as many segments


@dataclass(frozen=True, slots=True)
class Segment:
    """Units, the block that crosses into them (None: nothing does), and the stages that read their blocks."""

    units: range
    enters: int | None
    stages: range


@dataclass(frozen=True)
class Chain:
    """The segments of ``core``, in forward's order, and the blocks that are kept from forward to their last read."""

    core: Core
    segments: tuple[Segment, ...]
    always: frozenset[int]

    @cached_property
    def always_bytes(self) -> list[int]:
        """Bytes of the blocks ``always`` kept that some stage from t on reads, or remakes something from."""
        end = len(self.core.stages)
        last = _last_stage_that_matters(self)
        change = Counter[int]()
        for b in self.always:
            change[last[b] + 1] -= self.core.block_bytes[b]
        total = sum(self.core.block_bytes[b] for b in self.always)
        return [total + down for down in accumulate(change[t] for t in range(end))]


def chain_of(core: Core) -> Chain | None:
    """``core`` as a chain, or None if there are hardly any cuts."""
    if core.born and max(core.born) >= 0:
        return None
    found = [_cut(core, _always(core, len(core.units) // parts)) for parts in SPANS]
    positions, always = max(found, key=lambda cut: len(cut[0]))
    if len(positions) < FEW:
        return None
    return _with_stages(core, positions, always)


def _always(core: Core, span: int) -> frozenset[int]:
    """Blocks that are read more than ``span`` units after they are made, or that can't be made again."""
    long = (b for b, readers in enumerate(core.readers) if readers and readers[-1] - core.maker[b] > max(span, 1))
    pinned = (b for unit in core.units if unit.pinned for b in unit.makes)
    return frozenset((*long, *pinned)) - core.held


def _cut(core: Core, always: frozenset[int]) -> tuple[list[tuple[int, int | None]], frozenset[int]]:
    """The cuts, as (the unit that comes next, the block that crosses), and ``always``."""
    change, blocks = [0] * (len(core.units) + 1), [0] * (len(core.units) + 1)
    for b, readers in enumerate(core.readers):
        if readers and b not in always and b not in core.held:
            first, last = core.maker[b] + 1, readers[-1] + 1
            change[first] += 1
            change[last] -= 1
            blocks[first] += b
            blocks[last] -= b
    crossing = zip(accumulate(change), accumulate(blocks), strict=True)
    cuts: dict[int | None, int] = {}
    for u, (n, b) in enumerate(crossing):
        if n == 1 and u < len(core.units):
            cuts.setdefault(b, u)
    positions = sorted((u, b) for b, u in cuts.items())
    step = -(-len(positions) // MOST) if positions else 1
    return [(0, None), *positions[::step]], always


def _with_stages(core: Core, cuts: list[tuple[int, int | None]], always: frozenset[int]) -> Chain:
    """Each stage goes to the latest segment that it reads from, or to the one before it."""
    ends = [u for u, _ in cuts[1:]] + [len(core.units)]
    segment = [s for s, ((u, _), end) in enumerate(zip(cuts, ends, strict=True)) for _ in range(u, end)]
    enters = {b: s for s, (_, b) in enumerate(cuts)}
    now, of_stage, astray = len(cuts) - 1, list[int](), set[int]()
    for stage in core.stages:
        own = [b for b in stage.reads if b not in always]
        at = [segment[core.maker[b]] + (b in enters) for b in own]
        inside = [segment[core.maker[b]] for b in own if b not in enters]
        now = min(now, max(inside) if inside else max(at, default=now))
        of_stage.append(now)
        astray |= {b for b, s in zip(own, at, strict=True) if s != now and (b not in enters or s != now + 1)}
    count = Counter(of_stage)
    starts = dict(zip(range(len(cuts) - 1, -1, -1), accumulate((count[s] for s in range(len(cuts) - 1, 0, -1)), initial=0), strict=True))
    segments = tuple(
        Segment(range(u, end), b, range(starts[s], starts[s] + count[s]))
        for s, ((u, b), end) in enumerate(zip(cuts, ends, strict=True))
    )
    return Chain(core, segments, always | astray)


def _last_stage_that_matters(chain: Chain) -> dict[int, int]:
    """For each block that is always kept, the last stage of a segment that reads it, in forward or in backward."""
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
