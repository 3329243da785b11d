"""Core -> chain: forward is cut wherever a single block crosses, or a few, and backward with it."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from rematc.solve.reduce import Core
from rematc.solve.segments import Chain, Segment

MOST = 200  # segments; more would make their number's square too large
NEAR = 3  # segments that are read together, no farther apart than this, become one
AHEAD = 5  # stages that read something: where most of them are, backward has got to

Cut = tuple[int, frozenset[int]]  # the place of the unit that comes next, and the blocks that cross
NOTHING = frozenset[int]()


class _Life(NamedTuple):
    """Where a block is made and read last, as places in an order, and the last read not far from the former.

    -1: nowhere.
    """

    first: int
    last: int
    soon: int


def cut(
    core: Core, order: list[int], span: int, kept: frozenset[int], most: int, *, lends: bool = False
) -> Chain:
    """The chain where ``kept`` and blocks read more than ``span`` units after they are made are always kept.

    If it ``lends``, the latter are not, but lent, where they are read sooner, too. Units that are for
    ``kept`` alone are in no segment. Up to ``most`` blocks cross a cut.
    """
    read = {b for stage in core.stages for b in stage.reads} - core.held
    useful = core.upstream(read, kept) if kept else {*order}
    order = [u for u in order if u in useful]
    lives = _lives(core, order, max(span, 1))
    long = frozenset(b for b, life in enumerate(lives) if life.last > life.soon) - core.held
    pinned = {b for unit in core.units if unit.pinned for b in unit.makes}
    lent = frozenset(b for b in long if lives[b].soon >= 0) - pinned - kept if lends else NOTHING
    always = (long - lent | pinned | kept) - core.held
    ends = [life.soon if b in lent else life.last for b, life in enumerate(lives)]
    cuts = _cuts(
        core, len(order), [(life.first, end) for life, end in zip(lives, ends, strict=True)], always, most
    )
    while True:
        chain, needless, astray = _assigned(core, order, cuts, always, lent)
        if not needless and not astray:
            return chain
        cuts = [there for s, there in enumerate(cuts) if s not in needless]
        always |= astray
        lent -= astray


def _lives(core: Core, order: list[int], span: int) -> list[_Life]:
    """Of each block; what is read within ``span`` units is read soon."""
    place = {u: n for n, u in enumerate(order)}
    found = list[_Life]()
    for b, readers in enumerate(core.readers):
        first, reads = place.get(core.maker[b], -1), [place.get(u, -1) for u in readers]
        soon = [n for n in reads if n - first <= span or first < 0]
        found.append(_Life(first, max(reads, default=-1), max(soon, default=-1)))
    return found


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
    for n, crossing in sorted(few, key=lambda few: len(few[1])):
        if crossed.isdisjoint(crossing):
            found.append((n, crossing))
            crossed |= crossing
    every = max(1, -(-len(found) // MOST))
    return [(0, NOTHING), *sorted(found, key=lambda found: found[0])[::every]]


def _assigned(
    core: Core, order: list[int], cuts: list[Cut], always: frozenset[int], lent: frozenset[int]
) -> tuple[Chain, set[int], frozenset[int]]:
    """The chain of these cuts, each stage in the latest segment that it reads from or in the one before it.

    Also the cuts, by their place, that part what is read together, and blocks read too far away for that,
    even if they are ``lent``.
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
    needless, astray, until = set[int](), set[int](), dict[int, int]()
    for t, (own, there, then) in enumerate(zip(reads, latest, _ahead(latest), strict=True)):
        is_inside = all(low <= now <= high for _, low, high in own)
        if not is_inside and there is not None and (now - there <= NEAR or then <= there + NEAR):
            now = min(now, there)
        count[now] += 1
        for b, low, high in own:
            if now - high > NEAR and b in lent:
                until[b] = t
            elif max(low - now, now - high) > NEAR:
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
    segments.reverse()
    for b in lent:  # to units that are far from it, as long as they may run again
        near = segment[core.maker[b]] + (b in enters)
        far = [segments[segment[u]].stages.stop - 1 for u in core.readers[b] if segment.get(u, -1) > near]
        until[b] = max([until.get(b, -1), *far])
    kept = tuple((b, t) for b, t in sorted(until.items()) if t >= 0)
    return Chain(core, tuple(segments), always, kept), needless, frozenset(astray)


def _ahead(latest: Sequence[int | None]) -> list[float]:
    """For each stage, where those that follow are: the median of the next few. A lone one far off is none."""
    found, following = list[float](), deque[int](maxlen=AHEAD)
    for s in reversed(latest):
        found.append(median(following) if following else -1)
        if s is not None:
            following.appendleft(s)
    return found[::-1]
