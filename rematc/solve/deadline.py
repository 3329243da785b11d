"""A point in time that may be put off."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Deadline:
    """``at``, by the monotonic clock.

    >>> late = Deadline.after(-5.0)
    >>> late.left() < 0 < Deadline(late.at + 10.0).left()
    True
    """

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds from now; negative if it is over."""
        return self.at - time.monotonic()
