"""Values of the MILP's variables -> `Draft`: inside a span everything runs just before its first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rematc.solve.expand import Draft
from rematc.solve.formulate import Formulation
from rematc.solve.reduce import Core
from rematc.solve.tail import Way


def decode(f: Formulation, values: Sequence[float]) -> Draft:
    """The draft that ``values`` say. What a span makes for later ones alone runs before its last op."""
    core = f.core

    def kept(b: int, k: int) -> bool:
        return (b, k) in f.kept and values[f.kept[b, k]] > 0.5

    there: list[set[int]] = [set(core.held) for _ in f.spans.starts]
    for (b, k), x in f.kept.items():
        if values[x] > 0.5:
            there[k].add(b)
    again: list[set[int]] = [set() for _ in f.spans.starts]
    for (u, k), x in f.again.items():
        if values[x] > 0.5:
            again[k].add(u)
    way = _way(f, there[-1])
    runs: list[tuple[int, ...]] = []
    for k, at_hand, left in zip(f.told, there, again, strict=False):
        for t in f.spans[k]:
            wanted = set(core.stages[t].reads)
            if t == f.spans[k][-1]:
                wanted |= {b for u in left for b in core.units[u].makes if kept(b, k + 1)}
            units = missing(core, wanted, at_hand)
            left.difference_update(units)
            at_hand.update(b for u in units for b in core.units[u].makes)
            if (first := core.stages[t].unit) is not None:
                at_hand.update(core.units[first].makes)
            runs.append(tuple(units))
    runs += way.runs if way else ()
    return Draft(frozenset(b for b in range(len(core.block_bytes)) if kept(b, 0)), tuple(runs))


def _way(f: Formulation, at_hand: set[int]) -> Way | None:
    """The cheapest way through the tail with what is ``at_hand``."""
    possible = [way for _, way in f.ways if way.needs <= at_hand]
    return min(possible, key=lambda way: way.cost_ns, default=None)


def encode(f: Formulation, draft: Draft) -> dict[int, tuple[int | None, float]]:
    """The variables of what is kept and run again, each with the unit that it is about, and its value.

    What the tail finds at hand is about no unit: it is for the ways to choose from what there is.
    """
    core = f.core
    kept, runs = _kept(f, draft), {(u, f.spans.of(t)) for t, units in enumerate(draft.runs) for u in units}
    found: dict[int, tuple[int | None, float]] = {}
    found |= {x: (u, float((u, k) in runs)) for (u, k), x in f.again.items() if k in f.told}
    return found | {
        x: (core.maker[b] if k in f.told else None, float((b, k) in kept)) for (b, k), x in f.kept.items()
    }


def _kept(f: Formulation, draft: Draft) -> set[tuple[int, int]]:
    """(block, span) where the block is at hand when the span begins, and read before it is made again."""
    core, found = f.core, set()
    wanted: set[int] = set()
    for k in reversed(range(len(f.spans))):
        for t in reversed(f.spans[k]):
            stage = core.stages[t]
            if stage.unit is not None:
                wanted.difference_update(core.units[stage.unit].makes)
            wanted.update(stage.reads)
            for u in reversed(draft.runs[t]):
                wanted.difference_update(core.units[u].makes)
                wanted.update(core.units[u].reads)
        found |= {(b, k) for b in wanted if b not in core.held}
    return found


def missing(core: Core, blocks: Iterable[int], at_hand: set[int] | frozenset[int]) -> list[int]:
    """Units to run, in forward's order, so that ``blocks`` are there beside ``at_hand``."""
    found: set[int] = set()
    stack = [b for b in blocks if b not in at_hand]
    while stack:
        u = core.maker[stack.pop()]
        if u not in found:
            found.add(u)
            stack.extend(b for b in core.units[u].reads if b not in at_hand)
    return sorted(found)
