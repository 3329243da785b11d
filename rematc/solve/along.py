"""The plan that follows some blocks, of which it is decided where they are and when they are made again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from rematc.solve.decode import missing
from rematc.solve.expand import Draft
from rematc.solve.reach import Group, Stop
from rematc.solve.reduce import Core


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
