"""Core -> smaller Core: units that no plan gains by telling apart become one.

A *chain*: unit f makes one block v, which only unit g reads, and g's result is no larger. All else that
g reads is read by f too, is always at hand, or is made for g alone from what f reads and no smaller than
g's result. Whoever would keep v, or what is made for g alone, can run g when f runs and keep its result
instead, for the same time and no more memory. So f, g and what is made for g alone become one unit.

A *tie*: only unit g reads block v of unit f, both what f reads and g's result are no larger, and f needs no
more than g beside v. Whoever would keep v can keep what f reads, until g runs, and run f then; and g's
result from then on. So f and g become one unit, whatever else g reads: the sum of two branches, of which one
ends in a normalisation, is one.

Before that, the smallest blocks of a large core are taken out: they are saved, and not decided about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rematc.solve.reduce import Core, Stage, Unit

FEW = 64  # units; with no more, the small blocks are decided about too
SMALL = 0.001  # of what there is room for, or of what there is no room for, whichever is less


@dataclass(frozen=True)
class Merged:
    """A smaller `Core`, and how it stands to the full one.

    ``parts[u]`` are the full core's units behind unit u, in order, and ``lead[u]`` is the one of them that
    surely runs where u does; ``full_block[b]`` is the full core's block behind block b. The full core's
    ``small`` blocks are not in the smaller core: wherever one is read, it is saved.
    """

    core: Core
    full: Core
    parts: tuple[tuple[int, ...], ...]
    lead: tuple[int, ...]
    full_block: tuple[int, ...]
    small: frozenset[int] = frozenset()

    @property
    def small_bytes(self) -> int:
        """What the blocks take at the most that the smaller core does not count."""
        return sum(self.full.block_bytes[b] for b in self.small)

    @cached_property
    def apart(self) -> frozenset[int]:
        """The full core's units that need not run in forward where they do that they are one with."""
        parts = {p for parts in self.parts for p in parts if not self.full.units[p].required}
        return frozenset(parts.difference(self.lead))

    def counted(self, *, at_most: bool = False) -> Merged:
        """The same, but each stage counts the small blocks that it or a later one reads.

        Those that only runs of units read are there as long as one is to come, which a plan says: they are
        counted as long as one could come if ``at_most``, else not at all.
        """
        if not self.small:
            return self
        last, stages = last_needed(self.full, by_units=at_most), list[Stage]()
        for t, stage in enumerate(self.core.stages):
            more = sum(self.full.block_bytes[b] for b in self.small if last[b] >= t)
            before, during = stage.before_bytes + more, stage.op_bytes + more
            stages.append(replace(stage, before_bytes=before, op_bytes=during))
        return replace(self, core=replace(self.core, stages=tuple(stages)))

    def steps(self, u: int) -> list[tuple[frozenset[int], int]]:
        """For each part of unit u, in order: the core's blocks that it or a later one reads, its bytes.

        Those are its workspace, its results, and what parts before it made and it or a later one reads.
        """
        full, number = self.full, self._number
        units = [full.units[p] for p in self.parts[u]]
        found = []
        for i, part in enumerate(units):
            later = {b for p in units[i:] for b in p.reads}
            alive = set(part.makes) | {b for p in units[:i] for b in p.makes if b in later}
            own_bytes = part.workspace_bytes + sum(full.block_bytes[b] for b in alive)
            inputs = frozenset(number[b] for b in later if b in number)
            found.append((inputs - self.core.held, own_bytes))
        return found

    def lead_bytes(self, u: int) -> int:
        """What the lead of unit u takes beside what u reads, all of which the lead reads or is held.

        The lead of a tie is g, which reads v in place of what f reads: that is no larger.
        """
        lead = self.full.units[self.lead[u]]
        return lead.workspace_bytes + sum(self.full.block_bytes[b] for b in lead.makes)

    @cached_property
    def _number(self) -> dict[int, int]:
        return {b: n for n, b in enumerate(self.full_block)}


def last_needed(core: Core, *, by_units: bool) -> list[int]:
    """The last stage, by block, that reads it, or if ``by_units`` what units can make of it (-1: none)."""
    last = [-1] * len(core.block_bytes)
    for t, stage in enumerate(core.stages):
        for b in stage.reads:
            last[b] = t
    for unit in reversed(core.units if by_units else ()):
        until = max((last[b] for b in unit.makes), default=-1)
        for b in unit.reads if not unit.pinned else ():
            last[b] = max(last[b], until)
    return last


def unmerged(full: Core) -> Merged:
    """``full`` as it is."""
    units, blocks = range(len(full.units)), range(len(full.block_bytes))
    return Merged(full, full, tuple((u,) for u in units), tuple(units), tuple(blocks))


def merge(full: Core, most_bytes: int = 0) -> Merged:
    """Apply the rule to ``full``, as `reduce` made it, as often as it fits.

    Near the floor it can matter: what the first of a chain reads is counted until the last is done.
    Blocks of more than `FEW` units that together are no more than `SMALL` of ``most_bytes`` are not decided
    about, but saved.
    """
    small = _small(full, SMALL * most_bytes)
    rest = _without(full, small)
    units, parts, lead = _chains(rest, {b for stage in rest.stages for b in stage.reads})
    units = {u: unit for u, unit in units.items() if unit.makes or not small}  # some made small ones alone
    blocks = [b for u in sorted(units) for b in units[u].makes]
    number = {b: n for n, b in enumerate(blocks)}
    place = {u: n for n, u in enumerate(sorted(units))}
    core = Core(
        tuple(full.block_bytes[b] for b in blocks),
        tuple(full.values[b] for b in blocks),
        tuple(_renamed(units[u], number) for u in sorted(units)),
        tuple(_restaged(stage, number, place) for stage in rest.stages),
        frozenset(number[b] for b in full.held if b in number),
        full.base_bytes,
    )
    all_parts, leads = tuple(parts[u] for u in sorted(units)), tuple(lead[u] for u in sorted(units))
    return Merged(core, full, all_parts, leads, tuple(blocks), small)


def _small(core: Core, most_bytes: float) -> frozenset[int]:
    """The smallest blocks, of ``most_bytes`` together, among those that the forward pass makes anyway."""
    if most_bytes <= 0 or len(core.units) <= FEW or not core.has_forward:
        return frozenset()
    found: list[int] = []
    made = [b for u in core.units if u.required for b in u.makes if b not in core.held]
    for b in sorted(made, key=core.block_bytes.__getitem__):
        most_bytes -= core.block_bytes[b]
        if most_bytes < 0:
            break
        found.append(b)
    return frozenset(found)


def _without(core: Core, small: frozenset[int]) -> Core:
    """``core``, but that nobody makes or reads the ``small`` blocks."""
    if not small:
        return core

    def left(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(b for b in blocks if b not in small)

    units = (replace(u, reads=left(u.reads), makes=left(u.makes)) for u in core.units)
    stages = (replace(s, reads=left(s.reads), holds=left(s.holds)) for s in core.stages)
    return replace(core, units=tuple(units), stages=tuple(stages))


def _chains(core: Core, read: set[int]) -> tuple[dict[int, Unit], dict[int, tuple[int, ...]], dict[int, int]]:
    """Units left by index, the units that each stands for, and the leads: f of a chain, g of a tie."""
    units = dict(enumerate(core.units))
    lead = {u: u for u in units}
    parts: dict[int, tuple[int, ...]] = {u: (u,) for u in units}
    readers = {b: set(r) for b, r in enumerate(core.readers)}
    maker = {b: u for u, unit in units.items() for b in unit.makes}
    for f in list(units):
        while True:
            chain = _group(f, core, units, readers, maker, read)
            group = chain or _tie(f, core, units, readers, read)
            if group is None:
                break
            *inner, g = group
            unit = _fused(core, [units[u] for u in inner], units[g])
            for u in inner:
                for b in units[u].reads:
                    readers[b].discard(u)
                    readers[b].add(g)
                parts[g] += parts.pop(u)
                del units[u]
            units[g], parts[g], lead[g] = unit, tuple(sorted(parts[g])), lead[f] if chain else lead[g]
            f = g
    return units, parts, lead


def _group(
    f: int,
    core: Core,
    units: dict[int, Unit],
    readers: dict[int, set[int]],
    maker: dict[int, int],
    read: set[int],
) -> tuple[int, ...] | None:
    """Unit f, the units made for its one reader alone, and that reader; None if the rule does not fit."""

    def inner(u: int, g: int) -> bool:
        unit = units[u]
        return (
            not unit.pinned
            and len(unit.makes) == 1
            and unit.makes[0] not in core.held | read
            and readers[unit.makes[0]] == {g}
            and unit.required == units[g].required
            and core.block_bytes[unit.makes[0]] >= _result_bytes(core, units[g])
        )

    if f not in units or len(units[f].makes) != 1 or len(readers[units[f].makes[0]]) != 1:
        return None
    (g,) = readers[units[f].makes[0]]
    if units[g].pinned or not inner(f, g):
        return None
    at_hand = core.held | set(units[f].reads)
    group = [f]
    for b in units[g].reads:
        u = maker[b]
        if b in at_hand or u == f:
            continue
        if not (inner(u, g) and set(units[u].reads) <= at_hand):
            return None
        group.append(u)
    return (*sorted(group), g)


def _tie(
    f: int, core: Core, units: dict[int, Unit], readers: dict[int, set[int]], read: set[int]
) -> tuple[int, int] | None:
    """Unit f and its one reader; None if they are no tie."""
    unit = units.get(f)
    if unit is None or unit.pinned or len(unit.makes) != 1:
        return None
    (v,) = unit.makes
    if v in core.held | read or len(readers[v]) != 1:
        return None
    (g,) = readers[v]
    reader, size = units[g], core.block_bytes[v]
    inputs_bytes = sum(core.block_bytes[b] for b in {*unit.reads} - core.held)
    result_bytes = _result_bytes(core, reader)
    fits = max(inputs_bytes, result_bytes) <= size
    # what g itself needs: when parts that it has by now run, what they are made from is there, too
    fits &= inputs_bytes + unit.workspace_bytes <= result_bytes + core.units[g].workspace_bytes
    return (f, g) if fits and not reader.pinned and unit.required == reader.required else None


def _fused(core: Core, inner: list[Unit], last: Unit) -> Unit:
    """One unit for all: run in order, each inner block alive from its making to the end."""
    made = [b for u in inner for b in u.makes]
    result = _result_bytes(core, last)
    alive = peak = 0
    for u in inner:
        alive += sum(core.block_bytes[b] for b in u.makes)
        peak = max(peak, alive + u.workspace_bytes)
    workspace = max(peak - result, alive + last.workspace_bytes, 0)
    reads = {b for u in (*inner, last) for b in u.reads} - set(made)
    cost = sum(u.cost_ns for u in (*inner, last))
    return replace(last, reads=tuple(sorted(reads)), cost_ns=cost, workspace_bytes=workspace)


def _result_bytes(core: Core, unit: Unit) -> int:
    return sum(core.block_bytes[b] for b in unit.makes if b not in core.held)


def _renamed(unit: Unit, number: dict[int, int]) -> Unit:
    reads = tuple(number[b] for b in unit.reads)
    return replace(unit, reads=reads, makes=tuple(number[b] for b in unit.makes))


def _restaged(stage: Stage, number: dict[int, int], place: dict[int, int]) -> Stage:
    unit = None if stage.unit is None else place[stage.unit]
    reads, holds = (tuple(number[b] for b in blocks) for blocks in (stage.reads, stage.holds))
    return replace(stage, reads=reads, unit=unit, holds=holds)
