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
from rematc.resident import allocated_bytes
from rematc.storages import storages
from rematc.survey import Outside

LOOKS = 3  # passes of a graph that are watched, once Inductor has tuned its code
UNIT_BYTES = 1 << 16


def unknown_bytes(args: Arguments, known_bytes: int, accumulate: bool | None) -> int:
    """What is on the GPU when a step begins, above what is known to be there; 0 on a CPU, which can't say.

    State of an optimizer that nobody told of, gradients, another model. A number that is logged is no news.
    """
    if args.cuda is None:
        return 0
    passing = [p.grad for p in args.leaves if p.grad is not None] if accumulate is False else []
    more = allocated_bytes(args.cuda) - sum(size for _, size in storages(passing)) - known_bytes
    return max(0, more // UNIT_BYTES * UNIT_BYTES)


class Gpu:
    """When the last step began: more and less than was known to be there. Both are 0 on a CPU.

    ``steps`` have begun.
    """

    def __init__(self) -> None:
        self.unknown_bytes = self.missing_bytes = self.steps = 0

    def look(self, args: Arguments, known_bytes: int, accumulate: bool | None) -> bool:
        """Is there more of it than before that is not known?"""
        before, self.unknown_bytes = self.unknown_bytes, unknown_bytes(args, known_bytes, accumulate)
        return self.unknown_bytes > before

    def begin(self, args: Arguments, known_bytes: int) -> None:
        """A step begins; of what is planned for, an optimizer's state may not be there yet."""
        self.steps += 1
        self.missing_bytes = max(0, known_bytes - allocated_bytes(args.cuda)) if args.cuda else 0

    def watch(self, graph: Compiled, args: Arguments) -> Watch | None:
        """Looks at a graph when its code runs in a second step, and a few times more."""
        if graph.ran is not graph.made.run:
            graph.ran, graph.ran_in = graph.made.run, self.steps
        is_new = graph.ran_in == self.steps  # Inductor tunes it, or it was planned as if it were alone
        if args.cuda is None or is_new or not graph.is_chosen or graph.looks == LOOKS:
            return None
        graph.looks += 1
        return Watch(graph, args.cuda, self.missing_bytes)


class Watch:
    """The passes of one call of ``graph``; ``missing_bytes`` were planned for, and are not there."""

    def __init__(self, graph: Compiled, device: torch.device, missing_bytes: int) -> None:
        self.graph, self.highest, self.missing_bytes = graph, Highest(device), missing_bytes

    @torch.compiler.disable  # or Dynamo compiles it, where a function that it compiled calls autograd
    def begin(self, *_: Any) -> None:
        """A pass begins."""
        self.highest.begin_anew()

    @torch.compiler.disable
    def end(self, *_: Any) -> None:
        """It is over: what was more than planned is known from now on."""
        peak_bytes = self.highest.read() + self.missing_bytes
        more = peak_bytes - self.graph.plan.peak_bytes
        if more > UNIT_BYTES:
            held, meanwhile = self.graph.made.outside
            self.graph.outside |= Outside(held + more, meanwhile)

    def follow(self, call: Call[Compiled]) -> None:
        """Its forward pass is over; watch its backward pass too."""
        self.end()
        for node in [node for ref in call.nodes if (node := ref()) is not None]:
            node.register_prehook(self.begin)
            node.register_hook(self.end)
