"""Bytes alive while units run again, one after the other, before what needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from rematc.solve.merge import Merged


class Burst:
    """What runs of the units of ``merged`` need; how their parts run is looked up once."""

    def __init__(self, merged: Merged) -> None:
        self.core = merged.core
        self.steps = [merged.steps(u) for u in range(len(merged.core.units))]

    def live(self, runs: Sequence[int], wanted: Set[int], counted: frozenset[int]) -> Iterator[int]:
        """From the last run to the first, of ``counted`` blocks, if those ``wanted`` are there after them."""
        size, there = self.core.block_bytes, set(wanted)
        for u in reversed(runs):
            there.difference_update(self.core.units[u].makes)
            reads = counted.intersection(self.core.units[u].reads) - there
            beside = sum(size[b] for b in there)
            for inputs, own_bytes in self.steps[u]:
                yield beside + own_bytes + sum(size[b] for b in reads & inputs)
            there |= reads
