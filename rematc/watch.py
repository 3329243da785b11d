"""What is on a GPU around the graphs, and what they take there, as the caching allocator tells.

It may give more than it is asked for, by what it has to use again, and nobody can tell beforehand. What was
more counts as outside of the graph from then on.
"""

from __future__ import annotations

from typing import Any

import torch

from rematc.arguments import Arguments
from rematc.calls import Call
from rematc.compiled import Compiled
from rematc.highest import Highest
from rematc.over import when_over
from rematc.resident import allocated_bytes
from rematc.storages import storages
from rematc.survey import Outside

LOOKS = 3  # steps in which a graph is watched, once Inductor has tuned its code
UNIT_BYTES = 1 << 16


class Gpu:
    """``there_bytes`` were given out on the GPU when the last of ``steps`` began; None on a CPU.

    Of what was planned for then, ``missing_bytes`` were not there: an optimizer's state may come later.
    """

    def __init__(self) -> None:
        self.there_bytes: int | None = None
        self.steps = self.missing_bytes = 0

    def begin(self, args: Arguments) -> None:
        """A step begins."""
        self.steps += 1
        self.there_bytes = None if args.cuda is None else allocated_bytes(args.cuda)

    def unknown_bytes(self, args: Arguments, known_bytes: int, accumulate: bool | None) -> int:
        """What is there above what is known to be; 0 on a CPU, which can't say.

        State of an optimizer that nobody told of, gradients, another model. A number that is logged is no
        news.
        """
        if self.there_bytes is None:
            return 0
        passing = [p.grad for p in args.leaves if p.grad is not None] if accumulate is False else []
        more = self.there_bytes - sum(size for _, size in storages(passing)) - known_bytes
        return max(0, more // UNIT_BYTES * UNIT_BYTES)

    def miss(self, known_bytes: int) -> None:
        """So much was planned for."""
        self.missing_bytes = 0 if self.there_bytes is None else max(0, known_bytes - self.there_bytes)

    def watch(self, graph: Compiled, args: Arguments) -> Watch | None:
        """Looks at a graph when its code runs in a second step, and in a few more."""
        if graph.ran is not graph.made.run:
            graph.ran, graph.ran_in = graph.made.run, self.steps
        is_new = graph.ran_in == self.steps  # Inductor tunes it, or it was planned as if it were alone
        if args.cuda is None or is_new or not graph.is_chosen:
            return None
        if graph.looked_in != self.steps:
            graph.looks, graph.looked_in = graph.looks + 1, self.steps
        return Watch(graph, args.cuda, self.missing_bytes) if graph.looks <= LOOKS else None


class Watch:
    """The passes of one call of ``graph``; ``missing_bytes`` were planned for, and are not there."""

    def __init__(self, graph: Compiled, device: torch.device, missing_bytes: int) -> None:
        self.graph, self.highest, self.missing_bytes = graph, Highest(device), missing_bytes

    def follow(self, call: Call[Compiled]) -> None:
        """Its forward pass is over; watch its backward pass too."""
        self.end()
        for node in [node for ref in call.nodes if (node := ref()) is not None]:
            node.register_prehook(self.goes_back)

    @torch.compiler.disable  # or Dynamo compiles it, where a function that it compiled calls autograd
    def goes_back(self, _: Any) -> None:
        """Its backward pass begins."""
        self.highest.begin_anew()
        when_over(self.end)

    def end(self) -> None:
        """A pass is over: what was more than planned is known from now on."""
        peak_bytes = self.highest.read() + self.missing_bytes
        more = peak_bytes - self.graph.plan.peak_bytes
        if more > UNIT_BYTES:
            held, meanwhile = self.graph.made.outside
            self.graph.outside |= Outside(held + more, meanwhile)
