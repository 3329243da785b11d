"""Core -> chain of segments: forward is cut wherever a single block crosses, or a few, and backward with it.

Between two cuts lies a segment: its units read the blocks that cross into it, its own, and those that are
*always* kept, because they are read all over the graph (masks, position tables, an encoder's result) or made
from all over it (a sum of what each layer adds), can't be made twice, or are read in backward far from the
segment's other blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import attrgetter
from statistics import median

from rematc.solve.reduce import Core

MOST = 200  # segments; more would make their number's square too large
PARTS = (2, 4, 8, 16, 32, 64)  # of forward: a block that is read over more than one is kept
FEW = 3  # a chain has at least as many segments
WORTH = 0.9  # of what a chain needs: one that needs less than so much is taken, though it is less plain
MUCH = 0.2  # of what a chain needs is kept all over the graph: others are looked for
NEAR = 3  # segments that are read together, no farther apart than this, become one
AHEAD = 5  # stages that read something: where most of them are, backward has got to
CROSSING = (2, 4)  # blocks that may cross a cut, where one is not enough

Cut = tuple[int, frozenset[int]]  # the place of the unit that comes next, and the blocks that cross
NOTHING = frozenset[int]()


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
    """The segments of ``core``, in forward's order, and the blocks kept from forward to their last read."""

    core: Core
    segments: tuple[Segment, ...]
    always: frozenset[int]

    @cached_property
    def needs_bytes(self) -> int:
        """Bytes of what is always kept, and of the largest segment: backward can do with no more."""
        units, size = self.core.units, self.core.block_bytes
        made = (sum(size[b] for u in s.units for b in units[u].makes) for s in self.segments)
        return self.kept_bytes + max(made)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the blocks that are always kept."""
        return sum(self.core.block_bytes[b] for b in self.always)

    @cached_property
    def always_bytes(self) -> list[int]:
        """Bytes of the blocks ``always`` kept that some stage from t on reads, or remakes something from."""
        end = len(self.core.stages)
        last = _last_stage_that_matters(self)
        change = Counter[int]()
        for b in self.always:
            change[last[b] + 1] -= self.core.block_bytes[b]
        return [self.kept_bytes + down for down in accumulate(change[t] for t in range(end))]


def joined(segments: Sequence[Segment]) -> Segment:
    """``segments``, each after the other, as one."""
    first, last = segments[0], segments[-1]
    units = tuple(u for segment in segments for u in segment.units)
    return Segment(tuple(sorted(units)), first.enters, range(last.stages.start, first.stages.stop))


def chain_of(core: Core) -> Chain | None:
    """``core`` as a chain, or None if there are hardly any cuts.

    More blocks than one may cross a cut where, with single ones, much has to be kept all over the graph.
    """
    best = single_chain_of(core)
    if not core.has_forward or (best and best.kept_bytes <= MUCH * best.needs_bytes):
        return best
    forward, last_read = _order(core), _order_by_last_read(core)
    for order, most in ((last_read, 1), *product((forward, last_read), CROSSING)):
        best = _better(best, _least(core, order, most))
    return best


def single_chain_of(core: Core) -> Chain | None:
    """The same, where a single block crosses each cut, in the order of forward."""
    return _least(core, _order(core), 1) if core.has_forward else None


def _least(core: Core, order: list[int], most: int) -> Chain | None:
    """Of the chains of that ``order`` the one that needs least; one with a sum kept has to be worth it."""
    plain, gathered, collected = _ways(core, order, most)
    return _least_needy(filter(None, (_better(plain, gathered), collected)))


def _ways(core: Core, order: list[int], most: int) -> Iterator[Chain | None]:
    """The chain that needs least, with what each rule keeps besides: none, `_gathered`, `_collected`."""
    spans = [len(core.units) // parts for parts in PARTS]
    yield _least_needy(_chain(core, order, span, NOTHING, most) for span in spans)
    for rule in (_gathered, _collected):
        kept = ((span, rule(core, order, span)) for span in spans)
        yield _least_needy(_chain(core, order, span, blocks, most) for span, blocks in kept if blocks)


def _least_needy(chains: Iterable[Chain]) -> Chain | None:
    return min((c for c in chains if len(c.segments) >= FEW), key=attrgetter("needs_bytes"), default=None)


def _better(best: Chain | None, other: Chain | None) -> Chain | None:
    """``best``, or the ``other`` if that needs notably less."""
    if best is None or other is None:
        return best or other
    return other if other.needs_bytes < WORTH * best.needs_bytes else best


def _gathered(core: Core, order: list[int], span: int) -> frozenset[int]:
    """Blocks read in backward that more than ``span`` units of forward add to, which serve nothing else.

    Such is a sum of something from each layer: kept, none of its parts crosses a cut.
    """
    read = {b for stage in core.stages for b in stage.reads}
    serves, place = dict[int, set[int]](), {u: n for n, u in enumerate(order)}
    for u in reversed(range(len(core.units))):
        later = (serves[w] for b in core.units[u].makes for w in core.readers[b] if b not in read)
        found = {b for b in core.units[u].makes if b in read}.union(*later)
        serves[u] = found if len(found) <= 1 else {-1}
    first = {b: place[u] for u in reversed(order) for b in serves[u]}
    return frozenset(
        b
        for b, n in first.items()
        if b >= 0 and b not in core.held and place[core.maker[b]] - n > max(span, 1)
    )


def _collected(core: Core, order: list[int], span: int) -> frozenset[int]:
    """Blocks that backward needs, each made of several that were made more than ``span`` units before.

    Such is what each step of a recurrent model puts out, side by side: kept, none of them is read far away.
    """
    read = {b for stage in core.stages for b in stage.reads}
    needed, place = core.upstream(read), {u: n for n, u in enumerate(order)}
    far = Counter(
        u
        for u in needed
        for b in core.units[u].reads
        if b not in core.held and place[u] - place[core.maker[b]] > max(span, 1)
    )
    made = [b for u, many in far.items() if many >= FEW for b in core.units[u].makes]
    seen = set(made)
    while made:  # what is read is kept, and not what that is made of
        if (b := made.pop()) not in read:
            later = {c for u in core.readers[b] if u in needed for c in core.units[u].makes} - seen
            seen |= later
            made += later
    return frozenset(seen & read) - core.held


def _order(core: Core) -> list[int]:
    """All units in an order to cut: those that forward does not need come right after what they read."""
    at: dict[int, int] = {}
    for u, unit in enumerate(core.units):
        made = (at[core.maker[b]] for b in unit.reads)
        at[u] = u if unit.required else max(made, default=u)
    return sorted(at, key=lambda u: (at[u], u))


def _order_by_last_read(core: Core) -> list[int]:
    """All units in an order to cut: what backward reads last comes first, whichever way forward went.

    Of two towers, backward may go over one and then over the other.
    """
    last = [-1] * len(core.units)
    for t, stage in enumerate(core.stages):
        for b in stage.reads:
            last[core.maker[b]] = t
    for u in reversed(range(len(core.units))):
        for b in core.units[u].makes:
            last[u] = max([last[u], *(last[w] for w in core.readers[b])])
    return sorted(range(len(core.units)), key=lambda u: (-last[u], u))


def _chain(core: Core, order: list[int], span: int, kept: frozenset[int], most: int) -> Chain:
    """The chain where ``kept`` and blocks read more than ``span`` units after they are made are always kept.

    Units that are for ``kept`` alone are in no segment. Up to ``most`` blocks cross a cut.
    """
    read = {b for stage in core.stages for b in stage.reads} - core.held
    useful = core.upstream(read, kept) if kept else {*order}
    order = [u for u in order if u in useful]
    place = {u: n for n, u in enumerate(order)}
    lives = [
        (place.get(core.maker[b], -1), max((place.get(w, -1) for w in readers), default=-1))
        for b, readers in enumerate(core.readers)
    ]
    long = {b for b, (first, last) in enumerate(lives) if last - first > max(span, 1) and first >= 0}
    pinned = {b for unit in core.units if unit.pinned for b in unit.makes}
    always = frozenset(long | pinned | kept) - core.held
    cuts = _cuts(core, len(order), lives, always, most)
    while True:
        chain, needless, astray = _assigned(core, order, cuts, always)
        if not needless and not astray:
            return chain
        cuts = [cut for s, cut in enumerate(cuts) if s not in needless]
        always |= astray


def _cuts(
    core: Core, n_units: int, lives: list[tuple[int, int]], always: frozenset[int], most: int
) -> list[Cut]:
    """The cuts, those first that fewest blocks cross: no block crosses more than one.

    So what is kept at one cut is not what is kept at the next.
    """
    starts, ends = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for b, (first, last) in enumerate(lives):
        if last > first >= 0 and b not in always and b not in core.held:
            starts[first + 1].add(b)
            ends[last + 1].add(b)
    few, crossing = list[Cut](), NOTHING
    for n in range(1, n_units):
        crossing = (crossing | starts[n]) - ends[n]
        if 0 < len(crossing) <= most:
            few.append((n, crossing))
    found, crossed = list[Cut](), set[int]()
    for cut in sorted(few, key=lambda cut: len(cut[1])):
        if crossed.isdisjoint(cut[1]):
            found.append(cut)
            crossed |= cut[1]
    return [(0, NOTHING), *sorted(found, key=lambda cut: cut[0])[:: max(1, -(-len(found) // MOST))]]


def _assigned(
    core: Core, order: list[int], cuts: list[Cut], always: frozenset[int]
) -> tuple[Chain, set[int], frozenset[int]]:
    """The chain of these cuts, each stage in the latest segment that it reads from or in the one before it.

    Also the cuts, by their place, that part what is read together, and blocks read too far away for that.
    """
    ends = [*(n for n, _ in cuts[1:]), len(order)]
    segment = {u: s for s, ((n, _), end) in enumerate(zip(cuts, ends, strict=True)) for u in order[n:end]}
    enters = {b for _, crossing in cuts for b in crossing}
    reads = [
        [(b, s, s + (b in enters)) for b in stage.reads if b not in always for s in (segment[core.maker[b]],)]
        for stage in core.stages
    ]
    latest = [max((low for _, low, _ in own), default=None) for own in reads]
    now, count = len(cuts) - 1, Counter[int]()
    needless, astray = set[int](), set[int]()
    for own, there, then in zip(reads, latest, _ahead(latest), strict=True):
        is_inside = all(low <= now <= high for _, low, high in own)
        if not is_inside and there is not None and (now - there <= NEAR or then <= there + NEAR):
            now = min(now, there)
        count[now] += 1
        for b, low, high in own:
            if max(low - now, now - high) > NEAR:
                astray.add(b)
            else:  # one segment, from the block to the stage
                needless |= {*range(now + 1, low + 1), *range(high + 1, now + 1)}
    needless |= {s for s in range(1, len(cuts)) if not count[s]}  # no stage is left for it
    segments, start = [], 0
    for s in reversed(range(len(cuts))):
        first, crossing = cuts[s]
        units = tuple(sorted(order[first : ends[s]]))
        segments.append(Segment(units, crossing - always, range(start, start + count[s])))
        start += count[s]
    return Chain(core, tuple(reversed(segments)), always), needless, frozenset(astray)


def _ahead(latest: Sequence[int | None]) -> list[float]:
    """For each stage, where those that follow are: the median of the next few. A lone one far off is none."""
    found, following = list[float](), deque[int](maxlen=AHEAD)
    for s in reversed(latest):
        found.append(median(following) if following else -1)
        if s is not None:
            following.appendleft(s)
    return found[::-1]


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
