"""Threads that train at the same time with one backend: each has steps, and plans, of its own.

A step belongs to the thread that runs it forward until its backward pass has begun; then another thread may
go on with the next one, as those of a pool do. Only where a step is still open another thread gets `Steps`
of its own, for which graphs are compiled once more. Each keeps to the budget by itself: what they take
together is in no plan, and a warning says so.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from rematc import compat
from rematc.compiled import Compile, Compiled
from rematc.options import Options
from rematc.steps import Steps

log = logging.getLogger(__name__)
T = TypeVar("T")

AT_ONCE = (
    "%d threads train at the same time by rematc.backend(budget=%r): each keeps to the budget by itself, and "
    "together they may take as much more. Give each the part that it may take"
)
IN_BACKWARD = (
    "a compiled graph runs forward inside of a backward pass, as under a torch.utils.checkpoint around it "
    "(gradient_checkpointing, say). Plans count what it keeps as if it stayed from the first time on, and "
    "recompute more than there is need for: leave the checkpoint out, or compile what is around it too"
)
UNUSED = (
    "nothing was compiled by rematc.backend(budget=%r), so no budget was kept. Torch compiles the code of a "
    "model, but not torch.nn's own modules where DDP, say, wraps them: there DDP(torch.compile(model)); nor "
    "code with an nn.RNN, nn.GRU or nn.LSTM in it, unless %s is set"
)


class Threads:
    """``steps`` are those of all threads; which of these ran each last, and runs it now, is written here."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.steps: list[Steps] = []
        self.lock = threading.Lock()
        self.said: set[str] = set()
        self.unused = weakref.finalize(self, log.warning, UNUSED, options.budget, compat.RECURRENT)
        if options.budget is None:
            self.unused.detach()

    def graph(self, compile: Compile, inputs: Any) -> Callable[..., Any]:
        """Compile a graph that Dynamo found; what is returned runs it forward, in any thread."""
        graphs: dict[Steps | None, Compiled] = {}

        def compiled_in(steps: Steps) -> Compiled:
            graphs[steps] = steps.graph(compile, inputs)
            return graphs[steps]

        first = self._in_turn(compiled_in)

        def forward(*args: Any) -> Any:
            # A checkpoint runs it again in backward: as it was. Fake tensors are DDP's, to learn of shapes.
            again = first.made.plan is not None and compat.is_in_backward()
            if again:
                self.say_once(IN_BACKWARD)
            if again or first.made.plan is None or compat.is_any_fake(args):
                return graphs.get(self._last_of(threading.current_thread()), first).made.run(*args)
            return self._in_turn(lambda steps: run(steps, args))

        def run(steps: Steps, args: tuple[Any, ...]) -> Any:
            if steps not in graphs:
                graphs[steps] = steps.graph(compile.anew(), list(args))
            return steps.run(graphs[steps], args)

        return forward

    def _in_turn(self, then: Callable[[Steps], T]) -> T:
        """Do ``then`` with the steps of this thread: its own, or such as are free, or more."""
        me = threading.current_thread()
        with self.lock:
            steps = self._last_of(me) or self._free() or self._more()
            steps.thread = weakref.ref(me)  # it may have a batch, and be over
            steps.running += 1
        try:
            return then(steps)
        finally:
            steps.running -= 1

    def say_once(self, warning: str, about: str = "") -> None:
        """Of what keeps a budget from being kept, or kept well; where there is none, nothing is said.

        ``about``: what all such warnings have in common, if they have figures in them.
        """
        about = about or warning
        if warning and self.options.budget is not None and about not in self.said:
            log.warning("%s", warning)
            self.said.add(about)

    def _last_of(self, thread: threading.Thread) -> Steps | None:
        for steps in self.steps:  # one, most often
            if steps.thread is not None and steps.thread() is thread:
                return steps
        return None

    def _free(self) -> Steps | None:
        """Some in which nothing runs or waits to go back."""
        return next((s for s in self.steps if not s.running and not s.calls.open), None)

    def _more(self) -> Steps:
        if self.steps:
            log.warning(AT_ONCE, len(self.steps) + 1, self.options.budget)
        self.steps.append(Steps(self.options, self.say_once))
        return self.steps[-1]

    def resident_bytes(self) -> int:
        """What is there before a step of several graphs; 0 where no step had more than one."""
        return max((steps.resident_bytes() for steps in self.steps if steps.calls.kinds), default=0)
