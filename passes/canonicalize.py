"""Bring the joint graph into the shape that is planned for."""

from __future__ import annotations

import operator

from torch import fx

from rematc import compat
from rematc.capture import COLLECTIVE, must_run, pin_of
from rematc.passes.dropout import split_dropout
from rematc.passes.gathered import leave_to_plan
from rematc.passes.laid_out import TakenBy, lay_out
from rematc.passes.must_recompute import must_recompute
from rematc.passes.snapshot import snapshot
from rematc.passes.strided import by_shapes

APART = "rematc_apart"  # an argument that no op has


def canonicalize(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    *,
    runs_here: bool = True,
    for_inductor: bool = False,
    regather: bool = False,
    taken: TakenBy | None = None,
) -> fx.GraphModule:
    """Drop dead ops, lay values out as ops return them, say by shapes what is read by strides, merge equal
    ops, take dropout apart, keep the old values of inputs that forward overwrites, and recompute what the
    model says must be.

    ``joint`` is changed in place and returned, linted after every step. Not ``runs_here``: the plan is for
    another device than the one that its values are on, and what only this one can is not done.
    ``for_inductor``: it compiles the graph, which does not run op by op.
    ``regather``: how often ranks gather what they share is left to the plan, see `rematc.regather`.
    ``taken``: what was seen of ops that run as they are in the graph; None where they don't.
    """
    joint.graph.eliminate_dead_code()
    if taken is not None:
        lay_out(joint, taken)
    by_shapes(joint)
    joint.graph = _merged(joint.graph)
    _merge_takers(joint.graph)
    if runs_here:
        split_dropout(joint, for_inductor=for_inductor)
    joint.graph.lint()
    snapshot(joint, num_fwd_outputs)
    if regather:
        leave_to_plan(joint)
    must_recompute(joint, num_fwd_outputs)
    joint.graph.lint()
    joint.recompile()
    return joint


def _merged(graph: fx.Graph) -> fx.Graph:
    """The graph with equal ops merged, but for those that are to stay apart.

    Torch knows some random ops that must, and merges others, as randn_like: two drew the same numbers then.
    """
    for n, node in enumerate(filter(_is_once, graph.nodes)):  # ops of different arguments are not equal
        node.kwargs = {**node.kwargs, APART: n}
    merged = compat.common_subexpressions(graph)
    for node in merged.nodes:
        if APART in node.kwargs:
            node.kwargs = {name: arg for name, arg in node.kwargs.items() if name != APART}
    return merged


def _is_once(node: fx.Node) -> bool:
    """Is each such op one of its own, though another may look the same? Collectives compute, and no more."""
    return node.op == "call_function" and must_run(node) is not None and pin_of(node) != COLLECTIVE


def _merge_takers(graph: fx.Graph) -> None:
    """One node for each result of an op: torch leaves equal ones apart where they are views of an output."""
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        kept = first.setdefault(node.args, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
