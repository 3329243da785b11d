"""The plan that follows some blocks, of which it is decided where they are and when they are made again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from rematc.problem import Problem
from rematc.solve.decode import missing
from rematc.solve.expand import Draft, Written, expand
from rematc.solve.merge import Merged
from rematc.solve.reach import Group, Stop
from rematc.solve.reduce import Core


def keeping_more(
    problem: Problem, merged: Merged, groups: Sequence[Group], path: Mapping[int, Stop], asked_bytes: int
) -> Written | None:
    """The cheapest plan of ``path`` with as many other blocks kept from forward as have room; None without.

    Smallest first, and of one size those made first, or those made last.
    """
    core, found = merged.core, list[Written]()
    tracked = core.held | {b for group in groups for b in group}
    first = [b for b in range(len(core.block_bytes)) if b not in tracked]
    for in_time in (first, first[::-1]):
        others = sorted(in_time, key=core.block_bytes.__getitem__)
        low, high = -1, len(others)
        while low < high:
            middle = (low + high + 1) // 2
            draft = along(core, groups, path, frozenset(others[:middle]))
            written = expand(problem, merged, draft)
            if written.plan.peak_bytes <= asked_bytes:
                found.append(written)
                low = middle
            else:
                high = middle - 1
    return min(found, key=lambda w: w.plan.cost_ns, default=None)


def along(
    core: Core,
    groups: Sequence[Group] = (),
    path: Mapping[int, Stop] = MappingProxyType({}),
    kept: frozenset[int] = frozenset(),
) -> Draft:
    """The plan that follows ``path``: a group is its first block; what is neither tracked nor ``kept`` from
    forward is made when it is read. Without a path each stage makes all that it reads.
    """
    at_first = frozenset(b for unit in core.units if unit.pinned for b in unit.makes) - core.held | kept
    begin = min(path, default=0)
    runs: list[tuple[int, ...]] = []
    for t, stage in enumerate(core.stages):
        stop = path.get(t, Stop((), ()))
        there = {groups[n][0] for n in stop.there}
        at_hand, units = core.held | at_first, list[int]()
        if t == begin > 0:
            at_hand = _run(core, sorted(there), at_hand, units)
        at_hand |= there
        for u in (u for u in stop.units if not core.units[u].pinned):
            at_hand = _run(core, core.units[u].reads, at_hand, units) | set(core.units[u].makes)
            units.append(u)
        _run(core, stage.reads, at_hand, units)
        runs.append(tuple(units))
    saved = {groups[n][0] for n in path[0].there} if 0 in path else set[int]()
    read = {b for units in runs for u in units for b in core.units[u].reads}
    read |= {b for stage in core.stages for b in stage.reads}
    return Draft((at_first | saved) & read, tuple(runs))


def _run(core: Core, blocks: Iterable[int], at_hand: frozenset[int], units: list[int]) -> frozenset[int]:
    """Add to ``units`` those that make ``blocks``; returns what is at hand after them."""
    made = missing(core, blocks, at_hand)
    units += made
    return at_hand | {b for u in made for b in core.units[u].makes}
