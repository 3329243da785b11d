"""Where to cut: of several orders of forward, and of what is always kept, the chain that needs least."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import product
from operator import attrgetter

from rematc.solve.cuts import NOTHING, cut
from rematc.solve.reduce import Core
from rematc.solve.segments import Chain

PARTS = (2, 4, 8, 16, 32, 64)  # of forward: a block that is read over more than one is kept
FEW = 3  # a chain has at least as many segments
WORTH = 0.9  # of what a chain needs: one that needs less than so much is taken, though it is less plain
TIGHT = 0.75  # of the budget: a chain with a higher lowest peak is taken only if there is no other
HARDLY = 0.95  # of a peak: one higher than that is hardly lower
LARGE = 64  # units of a segment
MUCH = 0.2  # of what a chain needs is kept all over the graph: others are looked for
CROSSING = (2, 4)  # blocks that may cross a cut, where one is not enough

Ways = tuple[list[Chain], ...]  # with what each rule keeps besides: none, `_gathered`, `_collected`


def chains_of(core: Core, budget_bytes: float = math.inf) -> list[Chain]:
    """``core`` as a chain: that which needs least, if there are more than a few cuts.

    More blocks than one may cross a cut where, with single ones, much has to be kept all over the graph. If
    that one's lowest peak is too high for the budget, another comes last, of those with a lower one.
    """
    if not core.has_forward:
        return []
    forward = _order(core)
    ways = [_ways(core, forward, 1)]
    best, limit = _least(ways), _limit(_fine(ways), core, budget_bytes)
    if best and best.kept_bytes <= MUCH * best.needs_bytes and best.lowest_bytes <= limit:
        return [best]
    last_read = _order_by_last_read(core)
    others = (last_read, 1), *product((forward, last_read), CROSSING)
    ways += [_ways(core, order, most) for order, most in others]
    best = _least(ways)
    if best and best.lowest_bytes <= _limit([], core, budget_bytes):
        return [best]
    fine = _fine([*ways, *(_ways(core, order, 1, lends=True) for order in (forward, last_read))])
    limit = _limit(fine, core, budget_bytes)
    frugal = _least(fine, limit) if best is None or best.lowest_bytes > limit else None
    return [chain for chain in (best, frugal) if chain]


def chain_of(core: Core, budget_bytes: float = math.inf) -> Chain | None:
    """The last of `chains_of`, if there is one."""
    return next(reversed(chains_of(core, budget_bytes)), None)


def single_chain_of(core: Core, budget_bytes: float = math.inf) -> Chain | None:
    """The same, where a single block crosses each cut, in the order of forward."""
    ways = [_ways(core, _order(core), 1)] if core.has_forward else []
    if budget_bytes == math.inf:
        return _least(ways)
    return _least(_fine(ways), _limit(_fine(ways), core, budget_bytes))


def _ways(core: Core, order: list[int], most: int, *, lends: bool = False) -> Ways:
    """The chains of that ``order``."""
    spans = [len(core.units) // parts for parts in PARTS]

    def chains(kept: Iterable[tuple[int, frozenset[int]]]) -> list[Chain]:
        found = (cut(core, order, span, blocks, most, lends=lends) for span, blocks in kept)
        return [chain for chain in found if len(chain.segments) >= FEW]

    kept = ([(span, rule(core, order, span)) for span in spans] for rule in (_gathered, _collected))
    some = ([(span, blocks) for span, blocks in by_rule if blocks] for by_rule in kept)
    return tuple(map(chains, ([(span, NOTHING) for span in spans], *some)))


def _fine(ways: Iterable[Ways]) -> list[Ways]:
    """Those without a large segment: what is cheapest within it is not looked for."""
    return [tuple([c for c in chains if c.largest <= LARGE] for chains in way) for way in ways]


def _limit(ways: Iterable[Ways], core: Core, budget_bytes: float) -> float:
    """For the lowest peaks of chains: below it there is room enough, or hardly any is lower."""
    base = core.base_bytes
    lowest = (chain.lowest_bytes - base for way in ways for chains in way for chain in chains)
    return base + max(TIGHT * (budget_bytes - base), min(lowest, default=0) / HARDLY)


def _least(ways: Iterable[Ways], limit: float = math.inf) -> Chain | None:
    """The chain that needs least of those with a lowest peak of ``limit`` at the most; what comes later, or
    keeps a sum, has to be worth it.
    """
    best = None
    for way in ways:
        possible = ((c for c in chains if c.lowest_bytes <= limit) for chains in way)
        plain, gathered, collected = map(_least_needy, possible)
        best = _better(best, _least_needy(filter(None, (_better(plain, gathered), collected))))
    return best


def _least_needy(chains: Iterable[Chain]) -> Chain | None:
    return min(chains, key=attrgetter("needs_bytes"), default=None)


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
