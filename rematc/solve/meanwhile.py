"""Two things at once, so that which of them is first in real time decides nothing: work is counted for both.

What is done meanwhile asks before each step whether the other had ended by then, and waits until that is
known. This is how parallel solvers are made deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from rematc.solve.clock import Clock, current, using
from rematc.solve.deadline import Deadline

T = TypeVar("T")


@dataclass
class Until(Deadline):
    """Over at ``at``, or once what is done at the same time, by the clock ``other``, had ended."""

    other: Clock

    def left(self) -> float:
        """Seconds of work from now. Waits until ``other`` has come as far."""
        left = super().left()
        return 0.0 if left > 0 and self.other.ended_by(current().done) else left


@dataclass(frozen=True)
class Running(Generic[T]):
    """What runs in another thread, by the clock ``theirs``, since ``mine`` was the same."""

    future: Future[T]
    mine: Clock
    theirs: Clock

    def ends_within(self, seconds: float) -> bool:
        """Is so much work enough? Waits as long."""
        if self.theirs.ended_by(self.mine.done + seconds):
            return True
        self.mine.spend(seconds)
        return False

    def until(self, deadline: Deadline) -> Until:
        """Its end, or ``deadline``."""
        return Until(deadline.at, self.theirs)

    def result(self) -> T:
        """What it was for, once it has ended; that took as long here."""
        result = self.future.result()
        self.mine.join(self.theirs)
        return result


@contextmanager
def meanwhile(work: Callable[[], T]) -> Iterator[Running[T]]:
    """Run ``work`` in a thread, beside what is done inside.

    >>> with meanwhile(lambda: 2) as running:
    ...     running.ends_within(1.0), running.result()
    (True, 2)
    """
    mine = current()
    theirs = mine.beside()

    def run() -> T:
        with using(theirs):
            try:
                return work()
            finally:
                theirs.end()

    with ThreadPoolExecutor(1) as thread:
        yield Running(thread.submit(run), mine, theirs)
