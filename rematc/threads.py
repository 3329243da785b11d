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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rematc import compat
from rematc.compiled import Compile, Compiled
from rematc.options import Options
from rematc.steps import Steps

log = logging.getLogger(__name__)

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
    """``steps`` are those of all threads, ``last`` those that each ran last, if nobody else did since."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.steps: list[Steps] = []
        self.last: weakref.WeakKeyDictionary[threading.Thread, Steps] = weakref.WeakKeyDictionary()
        self.running: Counter[Steps] = Counter()  # forward, just now
        self.lock = threading.Lock()
        self.said: set[str] = set()
        self.unused = weakref.finalize(self, log.warning, UNUSED, options.budget, compat.RECURRENT)
        if options.budget is None:
            self.unused.detach()

    def graph(self, compile: Compile, inputs: Any) -> Callable[..., Any]:
        """Compile a graph that Dynamo found; what is returned runs it forward, in any thread."""
        with self._turn() as steps:
            first = steps.graph(compile, inputs)
        graphs: dict[Steps | None, Compiled] = {steps: first}

        def forward(*args: Any) -> Any:
            # A checkpoint runs it again in backward: as it was. Fake tensors are DDP's, to learn of shapes.
            again = first.made.plan is not None and compat.is_in_backward()
            if again:
                self.say_once(IN_BACKWARD)
            if again or first.made.plan is None or compat.is_any_fake(args):
                return graphs.get(self.last.get(threading.current_thread()), first).made.run(*args)
            with self._turn() as steps:
                if steps not in graphs:
                    graphs[steps] = steps.graph(compile.anew(), list(args))
                return steps.run(graphs[steps], args)

        return forward

    @contextmanager
    def _turn(self) -> Iterator[Steps]:
        """Inside, this thread runs the steps that it is given."""
        me = threading.current_thread()
        with self.lock:
            steps = self.last.get(me) or self._taken_by(me)
            self.running[steps] += 1
        try:
            yield steps
        finally:
            self.running[steps] -= 1

    def _taken_by(self, me: threading.Thread) -> Steps:
        """Those that are free, or more; they are nobody else's from now on."""
        steps = self._free() or self._more()
        for thread in [t for t, its in self.last.items() if its is steps]:
            del self.last[thread]
        self.last[me] = steps
        return steps

    def say_once(self, warning: str) -> None:
        """Of what keeps a budget from being kept, or kept well; where there is none, nothing is said."""
        if self.options.budget is not None and warning not in self.said:
            log.warning("%s", warning)
            self.said.add(warning)

    def _free(self) -> Steps | None:
        """Some in which nothing runs or waits to go back."""
        return next((s for s in self.steps if not self.running[s] and not s.calls.open), None)

    def _more(self) -> Steps:
        if self.steps:
            log.warning(AT_ONCE, len(self.steps) + 1, self.options.budget)
        self.steps.append(Steps(self.options, self.say_once))
        return self.steps[-1]

    def resident_bytes(self) -> int:
        """What is there before a step of several graphs; 0 where no step had more than one."""
        return max((steps.resident_bytes() for steps in self.steps if steps.calls.kinds), default=0)
