"""Steps of several calls, as they are on record: which graphs, and in which order they run and go back."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from rematc.calls import Call

G = TypeVar("G", bound=Hashable)


class Key(NamedTuple, Generic[G]):
    """What makes steps one kind: how many calls are carried, and graphs as they run and go back."""

    carried: int
    forward: tuple[G, ...]
    backward: tuple[G, ...]


@dataclass
class Kind(Generic[G]):
    """Steps of the same graphs; ``calls`` are those of the last one, in the order of their forward passes.

    The first ``carried`` of them ran forward before the step began, and went back in it. ``in_turns``: it is
    of a pipeline. ``others`` were open when it was over; ``beside_bytes`` is what others take while it runs,
    and ``staying_bytes`` the most that results of earlier batches of a pipeline did. ``unknown_bytes``: on a
    GPU when the last one began, beside what is known.
    """

    calls: list[Call[G]]
    carried: int = 0
    in_turns: bool = False
    others: list[Call[G]] = field(default_factory=list)
    beside_bytes: int = 0
    staying_bytes: int = 0
    unknown_bytes: int = 0

    @property
    def first_graph(self) -> G:
        """The one that begins it."""
        return self.calls[self.carried].graph

    @property
    def backward(self) -> list[Call[G]]:
        """The calls in the order in which they go back."""
        return _as_they_go_back(self.calls)

    def twice_bytes(self, turn: int) -> int:
        """What is counted twice while call number ``turn`` goes back, or is not there any more.

        A gradient that one graph hands to another counts as that one's until then, and as the other's once
        that goes back.
        """
        reached = self.backward[: turn + 1]
        return sum(size for call in reached for before, size in call.given if before in reached)

    @property
    def read(self) -> dict[int, int]:
        """The storages that are read, and that none of the calls made."""
        return {key: size for call in self.calls for key, size in call.inputs.items()}


def key_of(calls: Sequence[Call[G]], carried: int) -> Key[G]:
    """That of steps of these calls, the first of which are ``carried``."""
    forward, backward = (tuple(c.graph for c in order) for order in (calls, _as_they_go_back(calls)))
    return Key(carried, forward, backward)


def _as_they_go_back(calls: Sequence[Call[G]]) -> list[Call[G]]:
    """Those that have not by now are the last, and the latest is the first of them."""
    return sorted(reversed(calls), key=lambda call: call.went_back or math.inf)


def kept_beside(read: dict[int, int], calls: Sequence[Call[G]]) -> int:
    """Bytes of what ``calls`` keep or read until their backward passes begin, and is not in ``read``."""
    if not calls:  # as in most steps
        return 0
    still = [call for call in calls if call.is_open]
    inputs = {key: size for call in still for key, size in call.inputs.items() if key not in read}
    results = {key for call in still for key in call.results}
    kept = sum(call.kept_bytes for call in still)
    return kept + sum(inputs.values()) - sum(size for key, size in read.items() if key in results)
