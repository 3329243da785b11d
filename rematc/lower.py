"""Forward and backward FX graphs -> callables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from rematc import compat
from rematc.over import over


def op_by_op(module: fx.GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
    """Run the graph one op at a time, every value freed at its last use: exact to the byte.

    The callable takes one list and empties it (AOTAutograd's boxed convention): otherwise the
    caller would hold every saved tensor to the end of the backward pass. No op is cast: a trace has the
    casts of its autocast as ops of their own, and backward may be called inside of another one.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    unread = [i for i, node in enumerate(inputs) if not node.users]
    boxed = compat.boxed(module) or (lambda args: _Frugal(module).boxed_run(args))

    def run(args: list[Any]) -> Any:
        for i in unread:  # a value is let go of at its last use, and these have none
            args[i] = None
        with compat.autocast_off():
            results = boxed(args)
        over()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Frugal(fx.Interpreter):
    """For a torch that writes no boxed code: torch's interpreter, slower for each op.

    Torch's interpreter lets go of a value at its last use; this one also of a value that has none.
    """

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result if n.users or n.op == "output" else None
