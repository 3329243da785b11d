"""What lies outside of the compiled graphs while a step runs, as the allocator sees it in the first steps.

A loss that is computed outside, what eager code between two graphs keeps for its own backward pass, tensors
that hooks make. A survey follows one step. It is told when a graph begins and ends to run; whatever is
allocated from an end to the next beginning is outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rematc.allocations import Span
from rematc.storages import storages


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes outside of all graphs, around one of them: ``held_bytes`` are there while it runs; between its
    passes there are ``meanwhile_bytes`` more at the most.

    >>> Outside(8, 1) | Outside(2, 9)
    Outside(held_bytes=8, meanwhile_bytes=9)
    """

    held_bytes: int = 0
    meanwhile_bytes: int = 0

    def __iter__(self) -> Iterator[int]:
        yield from (self.held_bytes, self.meanwhile_bytes)

    def __or__(self, other: Outside) -> Outside:
        held = max(self.held_bytes, other.held_bytes)
        return Outside(held, max(self.meanwhile_bytes, other.meanwhile_bytes))


class Meter(Protocol):
    """Measures spans of a step: how far live bytes rose in each, from its `open` to its `shut`."""

    rises: list[Span]
    waits: bool  # it is read when the backward pass is over
    is_whole: bool  # it missed nothing

    def open(self) -> None:
        """A span begins."""

    def shut(self) -> None:
        """It ends; its rise may be known later."""

    def close(self) -> None:
        """There are no more."""


class Survey:
    """One step, from the end of its first forward pass to the beginning of its last backward pass.

    Calls are counted from 0, in the order in which they run forward. ``then`` is called when the survey may
    be closed.
    """

    def __init__(self, meter: Meter, then: Callable[[], object]) -> None:
        self.meter, self.then = meter, then
        self.calls = self.through = 0  # those that ran forward, and backward too
        self.ends: list[tuple[int, bool, int]] = []  # of spans: the call, is it backward, its bytes
        self.is_open = False
        self.going_back: int | None = None  # the call whose backward pass began last
        self.made: set[int] = set()  # storages that the last backward graph handed on

    def pause(self) -> None:
        """Something that is not outside begins: a forward pass, or a compiler."""
        self._ends(self.calls, False, 0)

    def forward_ends(self) -> None:
        """The next call has run forward."""
        self.calls += 1
        self._begins()

    def backward_begins(self, call: int, gradients: Any) -> None:
        """That of a call; what it is given was outside, and is no longer, unless another graph made it."""
        self.going_back = call
        if not self.is_open:  # nothing was outside since the last one, and what was before is there still
            self._begins()
        own = {key: size for key, size in storages(gradients) if key not in self.made}
        self._ends(call, True, sum(own.values()))
        self.through += 1
        if self.is_over and not self.meter.waits:
            self.then()

    def backward_ends(self, call: int, results: Any) -> None:
        """That of a call is through, and what is outside runs; it reads ``results``.

        Where the next one has begun before, nothing was outside in between.
        """
        if call != self.going_back:
            return
        self.made = {key for key, _ in storages(results)}
        if not self.is_over:
            self._begins()

    def pass_ends(self) -> None:
        """Autograd is through with a backward pass, and there will be another."""
        if not self.is_open:
            self._begins()

    @property
    def is_over(self) -> bool:
        """Has the backward pass of each call begun?"""
        return self.through == self.calls

    def close(self) -> list[Outside]:
        """What was found for each call, be it over or not; nothing if some of it was missed."""
        self.pause()
        self.meter.close()
        if not self.meter.is_whole:
            return []
        live, held, most = 0, [0] * self.calls, [0] * self.calls
        for (call, is_backward, own_bytes), (peak, end) in zip(self.ends, self.meter.rises, strict=True):
            around = call if is_backward else call - 1  # the call between whose passes this was
            most[around] = max(most[around], live + peak)
            live += end - own_bytes
            if call < self.calls:
                held[call] = max(held[call], live)
        return [Outside(h, max(0, m - h)) for h, m in zip(held, most, strict=True)]

    def _begins(self) -> None:
        self.is_open = True
        self.meter.open()

    def _ends(self, call: int, is_backward: bool, own_bytes: int) -> None:
        if self.is_open:
            self.is_open = False
            self.meter.shut()
            self.ends.append((call, is_backward, own_bytes))
