"""What Dynamo had a graph traced with: so it is traced again when it is planned anew, between steps.

Traced with the arguments of one step instead, numbers that vary from call to call would become constants of
the code, and so would strides, and the place of a batch in a larger tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import fx

from rematc import compat
from rematc.capture import is_symbolic

T = TypeVar("T")


class Traced:
    """The inputs of a graph as Dynamo shows them, made while it compiles: without memory, numbers open."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        values = (node.meta.get("example_value") for node in gm.graph.nodes)
        self.numbers: list[Any] = [value for value in values if is_symbolic(value)]
        self.context = compat.tracing_context() if self.numbers else None
        self.inputs = [] if self.context is None else [compat.stand_in(x, self.context) for x in inputs]

    def trace(self, compile: Callable[[Sequence[Any]], T], inputs: Sequence[Any]) -> T:
        """What ``compile`` makes of the graph, with ``inputs`` or with what stands for them."""
        is_later = self.context is not None and compat.tracing_context() is not self.context
        if not is_later or not any(map(compat.may_vary, self.numbers)):  # sizes are fixed (`rematc.pose`)
            return compile(inputs)
        with compat.traced_in(self.context):
            try:
                return compile(list(self.inputs))
            except compat.restart():  # torch knows the number for a constant from now on
                return compile(list(self.inputs))
