"""Joint graph and plan -> forward and backward, recomputation in it."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from rematc import compat
from rematc.capture import Capture, is_symbolic
from rematc.passes.replay import replay
from rematc.plan import Plan
from rematc.schedule import one_of_each_storage


def split(
    joint: fx.GraphModule,
    captured: Capture,
    plan: Plan,
    num_fwd_outputs: int,
    *,
    shared: bool = False,
    parted: Collection[int] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward module that ``plan`` says.

    Inputs and outputs are in AOTAutograd's order (torch's own function makes the two modules); the
    bodies are then replayed step by step as the plan has them, ``shared`` and ``parted`` as in `replay`; but
    backward's steps are counted after forward's. Both graphs are linted.
    """
    plan = one_of_each_storage(captured.graph, plan)
    saved = [captured.value_nodes[v] for v in plan.saved]
    nodes = _primals_read_in_backward(captured, plan) + [n for n in saved if n is not None]
    tensors = [n for n in nodes if not is_symbolic(n.meta.get("val"))]
    sizes = [n for n in nodes if is_symbolic(n.meta.get("val"))]
    forward, backward = _modules(joint, tensors, sizes, num_fwd_outputs)
    graph = captured.graph
    steps, results = graph.forward_steps(plan.saved), (*graph.outputs, *plan.saved)
    late = [position - len(steps) for position in parted]
    replay(forward, joint, captured, steps, results, shared=shared, parted=parted)
    replay(backward, joint, captured, plan.backward, graph.gradients, shared=shared, parted=late)
    return forward, backward


def _modules(
    joint: fx.GraphModule, tensors: list[fx.Node], sizes: list[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward as torch extracts them, ``tensors`` and ``sizes`` saved between them.

    Torch drops a saved value that no backward op reads when every op runs once. A plan may read it
    all the same, so for the time of the call each is a result of the backward pass as well.
    """
    (output,) = joint.graph.find_nodes(op="output")
    results, descriptions = output.args[0], output.meta["desc"]
    output.args = ((*results, *tensors),)
    output.meta["desc"] = [*descriptions, *(None for _ in tensors)]
    try:
        forward, backward = compat.extract_modules(joint, tensors, sizes, num_fwd_outputs)
    finally:
        output.args, output.meta["desc"] = (results,), descriptions
    (ends,) = backward.graph.find_nodes(op="output")
    gradients = len(results) - num_fwd_outputs
    ends.args = (ends.args[0][:gradients],)
    ends.meta["desc"] = ends.meta["desc"][:gradients]
    return forward, backward


def _primals_read_in_backward(captured: Capture, plan: Plan) -> list[fx.Node]:
    """The step's inputs that backward steps read: handed over like saved values, at no cost."""
    graph = captured.graph
    read = {v for i in plan.backward for v in graph.ops[i].inputs} | set(graph.gradients)
    nodes = [captured.value_nodes[v] for v in graph.inputs if v in read]
    return [n for n in nodes if n is not None and n.op == "placeholder"]
