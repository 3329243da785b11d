"""Keep the old value of every input that the forward pass overwrites and the backward pass may read.

BatchNorm reads its running statistics and ends by overwriting them (`copy_`). Recomputed in the
backward pass it would read the new ones. So its readers get a clone taken before: an ordinary value,
that a plan saves like any other, and whose op can't be recomputed. Inputs that have gradients and are no
leaves AOTAutograd overwrites after the forward graph, with one of its results.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from rematc import compat
from rematc.capture import SNAPSHOT


def snapshot(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Give the readers of each overwritten input a clone of it, where backward depends on them."""
    matters = _before_backward(joint, num_fwd_outputs)
    for target in _overwritten(joint):
        readers = [n for n in target.users if n in matters and not _writes(n, target)]
        if not readers:
            continue
        with joint.graph.inserting_before(next(n for n in joint.graph.nodes if n in target.users)):
            clone = joint.graph.call_function(torch.ops.aten.clone.default, (target,))
        clone.meta = {k: v for k, v in target.meta.items() if k in ("stack_trace", "nn_module_stack")}
        clone.meta["val"] = target.meta["val"].clone()
        clone.meta[SNAPSHOT] = True
        for reader in readers:
            reader.replace_input_with(target, clone)


def _overwritten(joint: fx.GraphModule) -> list[fx.Node]:
    """Inputs that some op of the graph writes into, or AOTAutograd after it, in order."""
    (output,) = joint.graph.find_nodes(op="output")
    results = output.meta.get("desc") or ()
    later = [d.mutated_input for d in results if hasattr(d, "mutated_input")]
    inputs = joint.graph.find_nodes(op="placeholder")
    return [n for n in inputs if n.meta.get("desc") in later or any(_writes(u, n) for u in n.users)]


def _writes(op: fx.Node, target: fx.Node) -> bool:
    if not compat.is_overload(op.target):
        return False
    arguments = compat.schema(op.target).arguments
    given = [*zip(arguments, op.args, strict=False)]
    given += [(a, op.kwargs[a.name]) for a in arguments if a.name in op.kwargs]
    return any(value is target and a.is_write for a, value in given)


def _before_backward(joint: fx.GraphModule, num_fwd_outputs: int) -> set[fx.Node]:
    """Everything that the gradients depend on."""
    (output,) = joint.graph.find_nodes(op="output")
    return ancestors(output.args[0][num_fwd_outputs:])


def ancestors(nodes: Iterable[object]) -> set[fx.Node]:
    """``nodes``, as far as they are some, and all that they depend on."""
    stack = [n for n in nodes if isinstance(n, fx.Node)]
    found = set(stack)
    while stack:
        for n in stack.pop().all_input_nodes:
            if n not in found:
                found.add(n)
                stack.append(n)
    return found
