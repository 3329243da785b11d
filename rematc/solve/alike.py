"""What is found out about one layer, said of all that are like it.

Where a model repeats itself, a solution of the relaxation that breaks a cut in some layers moves on to others
once the cut is there, layer by layer. So each cut is added for all layers at once. Layers need not be known
for that: a unit of the same cost and sizes, and blocks as far away from it, make a cut of their own if they
are a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rematc.solve.paths import Cut
from rematc.solve.reduce import Core

Kind = tuple[object, ...]


class Alike:
    """The cuts of ``core`` that are like others."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.kinds = [self._kind(u) for u in range(len(core.units))]
        self.units = dict[Kind, list[int]]()
        for u, kind in enumerate(self.kinds):
            self.units.setdefault(kind, []).append(u)
        self.read = dict[int, list[int]]()
        for t, stage in enumerate(core.stages):
            for b in stage.reads:
                self.read.setdefault(b, []).append(t)

    def of(self, cuts: Iterable[Cut]) -> Iterator[Cut]:
        """Each of ``cuts``, and those like it: the same of other units, at the same stages."""
        seen = set[tuple[object, ...]]()
        for cut in cuts:
            yield cut
            first = self.core.units[cut.unit].makes[0]
            offsets = tuple(b - first for b in cut.blocks)
            runs = cut.run and (cut.run[0] - cut.unit, cut.run[1])
            form = (self.kinds[cut.unit], offsets, cut.first, cut.end, cut.kept is None, runs)
            if form not in seen:
                seen.add(form)
                yield from self._others(cut, first)

    def _others(self, cut: Cut, first: int) -> Iterator[Cut]:
        for u in self.units[self.kinds[cut.unit]]:
            shift = self.core.units[u].makes[0] - first
            blocks = tuple(b + shift for b in cut.blocks)
            kept = cut.kept if cut.kept is None else cut.kept + shift
            run = cut.run and (cut.run[0] + u - cut.unit, cut.run[1])
            other = replace(cut, unit=u, blocks=blocks, kept=kept, run=run)
            if u != cut.unit and self.is_true(other):
                yield other

    def is_true(self, cut: Cut) -> bool:
        """Are its blocks a path from its unit, made before it begins, and is the last one asked for?"""
        core, u = self.core, cut.unit
        for b, after in zip(cut.blocks, (*cut.blocks[1:], None), strict=True):
            if b not in core.units[u].makes or b in core.held or core.born[u] >= cut.first:
                return False
            if after is not None:
                if not 0 <= after < len(core.maker) or b not in core.units[core.maker[after]].reads:
                    return False
                u = core.maker[after]
        return self._is_asked(cut)

    def _is_asked(self, cut: Cut) -> bool:
        last = cut.blocks[-1]
        if cut.run is not None:
            w = cut.run[0]
            return 0 <= w < len(self.core.units) and last in self.core.units[w].reads
        return cut.kept == last or any(cut.first <= t < cut.end for t in self.read.get(last, ()))

    def _kind(self, u: int) -> Kind:
        unit, size = self.core.units[u], self.core.block_bytes
        return unit.cost_ns, tuple(size[b] for b in unit.makes), tuple(size[b] for b in unit.reads)
