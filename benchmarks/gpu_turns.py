"""Who runs when: the time that each model has, and the GPU for one process at a time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rematc.costs import table


class Clock:
    """Says what there is time for: each model has an equal part of what is left when it begins."""

    def __init__(self, minutes: float, models: int, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.end, self.models = now, now() + 60 * minutes, models
        self.model_end = self.end
        self.longest = 0.0

    def begin_model(self) -> None:
        """The next model begins."""
        self.model_end = self.now() + max(0.0, self.end - self.now()) / max(1, self.models)
        self.models -= 1
        self.longest = 0.0

    def has_time(self) -> bool:
        """Is there time for as long as the longest cell of this model took?"""
        return self.now() + self.longest < self.model_end

    def ran(self, seconds: float) -> None:
        """A cell took so long."""
        self.longest = max(self.longest, seconds)


class Turns:
    """The GPU for one process alone, while others that were given the same ``path`` compile."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for the others; inside they wait."""
        if self.path is None:
            yield
            return
        with self.path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def for_ops(self) -> AbstractContextManager[Any]:
        """Inside, rematc times ops in turn too."""
        time_ops = table.timings

        def timings(*args: Any) -> Any:
            with self.mine():
                return time_ops(*args)

        return mock.patch.object(table, "timings", timings)
