"""Families of subsets of a few groups, as bit sets: a bit for each subset, 64 subsets to a word.

A subset's name has bit n if group n is in it: its last six bits are a place in a word, the others say which
word. So what holds for the first six groups is a mask of a word, and what holds for the others an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

LOW = 6  # groups within a word
NEVER = 1 << 56  # bytes of a group that isn't there: with it, a subset is beyond every limit
Family = Any  # an axis of 2 for each group after the first six, the last group's first, and one of 1; uint64
_PLACES = np.arange(64, dtype=np.uint64)
_WITH = [np.uint64(sum(1 << place for place in range(64) if place >> n & 1)) for n in range(LOW)]


class Part:
    """The subsets with some groups in them and some not: the words ``cut``, the places ``mask``."""

    def __init__(self, universe: Subsets, there: Mapping[int, bool]) -> None:
        self.mask = np.uint64(2**64 - 1)
        for n, is_in in there.items():
            if n < LOW:
                self.mask &= _WITH[n] if is_in else ~_WITH[n]
        axes = reversed(range(LOW, universe.groups))
        self.cut = (*(int(there[n]) if n in there else slice(None) for n in axes), ...)


class Subsets:
    """All subsets of groups of ``sizes`` bytes, which take the sum of them.

    >>> of = Subsets([3, 5])
    >>> [of.members(int(name)) for name in of.names(of.within(5))]
    [(), (0,), (1,)]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.groups = max(len(sizes), LOW)
        low = _sums([*sizes[:LOW], *[NEVER] * (LOW - len(sizes))])
        order = np.argsort(low, kind="stable")
        self._low, self._sorted = low, low[order]
        self._first = np.concatenate([_PLACES[:1], np.cumsum(np.uint64(1) << _PLACES[order])])
        self.high_bytes = _sums(sizes[LOW:]).reshape(self._shape)
        self._sides = [(self.part({n: False}), self.part({n: True})) for n in range(self.groups)]

    @property
    def _shape(self) -> list[int]:
        return [2] * (self.groups - LOW) + [1]

    def part(self, there: Mapping[int, bool]) -> Part:
        """The subsets with some groups ``there``, and some not."""
        return Part(self, there)

    def all(self) -> Family:
        """All of them, those of groups that aren't there too: none of these is within a limit."""
        return np.full(self._shape, 2**64 - 1, dtype=np.uint64)

    def places(self, room_bytes: Any) -> Any:
        """Which places of words fit, of words whose groups leave ``room_bytes``."""
        return self._first[np.searchsorted(self._sorted, room_bytes, side="right")]

    def within(self, limit_bytes: int) -> Family:
        """The subsets of no more than ``limit_bytes``."""
        return self.places(limit_bytes - self.high_bytes)

    def keep(self, family: Family, part: Part) -> Family:
        """Those of a family that are in ``part``."""
        kept = np.zeros_like(family)
        kept[part.cut] = family[part.cut] & part.mask
        return kept

    def drop(self, family: Family) -> None:
        """Add all subsets of those in a family."""
        for n, (low, high) in enumerate(self._sides):
            if n < LOW:
                family |= (family & high.mask) >> np.uint64(1 << n)
            else:
                family[low.cut] |= family[high.cut]

    def with_group(self, family: Family, n: int) -> Family:
        """Those of a family without group ``n``, with it."""
        low, high = self._sides[n]
        if n < LOW:
            return (family & low.mask) << np.uint64(1 << n)
        added = np.zeros_like(family)
        added[high.cut] = family[low.cut]
        return added

    def names(self, family: Family) -> Any:
        """The names of all subsets in a family, in order."""
        words = family.ravel()
        (which,) = np.nonzero(words)
        bits = words[which, None] >> _PLACES & np.uint64(1)
        return ((which[:, None] << LOW) + np.arange(64))[bits == 1]

    def smallest(self, family: Family) -> int:
        """The name of the first with the fewest bytes."""
        names = self.names(family)
        sizes = self.high_bytes.ravel()[names >> LOW] + self._low[names & 63]
        return int(names[np.argmin(sizes)])

    def has(self, family: Family, name: int) -> bool:
        """Is the subset in the family?"""
        return bool(int(family.ravel()[name >> LOW]) >> (name & 63) & 1)

    def members(self, name: int) -> tuple[int, ...]:
        """The groups in a subset."""
        return tuple(n for n in range(self.groups) if name >> n & 1)


def _sums(sizes: Iterable[int]) -> Any:
    """Of each subset, by name."""
    sums = np.zeros(1, dtype=np.int64)
    for size in sizes:
        sums = np.concatenate([sums, sums + size])
    return sums
