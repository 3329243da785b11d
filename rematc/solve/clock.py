"""A clock that counts work in place of time, so that what is cut short is cut alike on every run and machine.

Whoever does what can take long says how much it was, by `spend`, in seconds that it takes about on one of the
cores that the benchmarks ran on. Real time only guards: if a search takes `GUARD` times as long as it counts,
it ends, and its plan says that another run may find another. CPLEX calls such seconds ticks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Condition

GUARD = 6.0  # times the limit: a machine may be half as fast, and some MILPs take far longer than they count


@dataclass
class Clock:
    """``done`` seconds of work so far, up to ``guard`` by the monotonic clock.

    >>> with counted(limit_s=10.0) as clock:
    ...     spend(2.0)
    ...     clock.done, clock.was_cut
    (2.0, False)
    """

    done: float = 0.0
    guard: float = math.inf
    was_cut: bool = False  # by the guard
    is_over: bool = False  # who does the work has ended it
    changed: Condition = field(default_factory=Condition, repr=False)

    def spend(self, seconds: float) -> None:
        """So much was done."""
        with self.changed:
            self.done += seconds
            self.changed.notify_all()

    def end(self) -> None:
        """There is nothing more to do."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def ended_by(self, done: float) -> bool:
        """Was it over when so much was done? Waits until that can be told."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_over or self.done > done)
            return self.done <= done

    def left(self, done: float) -> float:
        """Seconds until so much is done; none if there is no real time left for it."""
        if time.monotonic() >= self.guard and self.done < done:
            self.was_cut = True
            return 0.0
        return done - self.done

    def real_left(self) -> float:
        """Seconds of real time."""
        return self.guard - time.monotonic()

    def beside(self) -> Clock:
        """Another one for what runs at the same time, from now on."""
        return Clock(self.done, self.guard)

    def join(self, other: Clock) -> None:
        """What ran ``beside`` is over: what took longer counts."""
        self.spend(max(0.0, other.done - self.done))
        self.was_cut |= other.was_cut


_clock: ContextVar[Clock] = ContextVar("clock")


def current() -> Clock:
    """That of this thread."""
    clock = _clock.get(None)
    if clock is None:
        _clock.set(clock := Clock())
    return clock


def spend(seconds: float) -> None:
    """So much work was done here."""
    current().spend(seconds)


@contextmanager
def using(clock: Clock) -> Iterator[Clock]:
    """Inside, ``clock`` is that of this thread."""
    token = _clock.set(clock)
    try:
        yield clock
    finally:
        _clock.reset(token)


@contextmanager
def counted(limit_s: float = math.inf) -> Iterator[Clock]:
    """Inside, a clock from 0 on, guarded for ``limit_s``; what it counts is spent outside as well."""
    outside, clock = current(), Clock(guard=time.monotonic() + GUARD * limit_s)
    try:
        with using(clock):
            yield clock
    finally:
        outside.spend(clock.done)
        outside.was_cut |= clock.was_cut


@contextmanager
def paused(limit_s: float) -> Iterator[Clock]:
    """Inside, a clock from 0 on for ``limit_s``; outside it was no time at all."""
    outside, started = current(), time.monotonic()
    clock = Clock(guard=started + GUARD * limit_s)
    try:
        with using(clock):
            yield clock
    finally:
        outside.guard += time.monotonic() - started
        outside.was_cut |= clock.was_cut
