"""Who runs when: the time that each model has, and the GPU for one process at a time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any
from unittest import mock

from rematc.costs import Table, rates

Backend = Callable[..., Callable[..., Any]]


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
    """The GPU for one process alone, while others that were given the same ``path`` compile.

    A GPU that several use at once goes from one to the other in slices, and what is timed meanwhile, by
    rematc, by Inductor where it tunes kernels, or here, is worth nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.held: IO[str] | None = None
        self.waited_s = self.had_s = 0.0  # for the turn, and of it
        self.began = 0.0

    def take(self) -> None:
        """Wait for the others; until `give` they wait."""
        if self.path is not None and self.held is None:
            self.held = self.path.open("w")
            asked = time.monotonic()
            fcntl.flock(self.held, fcntl.LOCK_EX)
            self.began = time.monotonic()
            self.waited_s += self.began - asked

    def give(self) -> None:
        """Let the others go on."""
        if self.held is not None:
            self.held.close()
            self.held = None
            self.had_s += time.monotonic() - self.began

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Inside the others wait; what was taken before is not given."""
        had = self.held is not None
        self.take()
        try:
            yield
        finally:
            if not had:
                self.give()

    def from_the_first_run(self, backend: Backend) -> Backend:
        """Compiles as ``backend`` does; who runs the code takes his turn, and has to give it."""

        def compiling(gm: Any, inputs: Any, **settings: Any) -> Callable[..., Any]:
            compiled = backend(gm, inputs, **settings)

            def run(*args: Any) -> Any:
                self.take()
                return compiled(*args)

            return run

        return compiling

    @contextmanager
    def for_costs(self) -> Iterator[None]:
        """Inside, rematc measures in turn too: rates, and what ops take, if no other has by then."""

        def in_turn(measure: Callable[..., Any]) -> Callable[..., Any]:
            def measured(*args: Any, **settings: Any) -> Any:
                with self.mine():
                    return measure(*args, **settings)

            return measured

        with ExitStack() as stack:
            for home, name in ((rates, "calibrate"), (Table, "times"), (Table, "taken")):
                stack.enter_context(mock.patch.object(home, name, in_turn(getattr(home, name))))
            yield
