"""A point in time that may be put off, by the clock that counts work."""

from __future__ import annotations

from dataclasses import dataclass

from rematc.solve.clock import current


@dataclass
class Deadline:
    """Over once ``at`` seconds of work are done.

    >>> late = Deadline.after(-5.0)
    >>> late.left() < 0 < Deadline(late.at + 10.0).left()
    True
    """

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(current().done + seconds)

    def left(self) -> float:
        """Seconds from now; none or less if it is over."""
        return current().left(self.at)
