"""Rewrite a module's body as a list of steps, each a copy of nodes of the joint graph."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator
from typing import NamedTuple

from torch import fx

from rematc import compat
from rematc.capture import Capture

STEP = "rematc_step"  # meta key: the `Place` of a node


class Place(NamedTuple):
    """The numbers of a node's step in its module, of the kernel that it is in, and of the group of kernels.

    What is in different kernels is not fused, and what is in different groups not even called at once.
    """

    step: int
    kernel: int
    group: int


def replay(
    module: fx.GraphModule,
    joint: fx.GraphModule,
    captured: Capture,
    steps: Iterable[int],
    results: Iterable[int],
    *,
    shared: bool = False,
    parted: Container[int] = (),
) -> None:
    """Keep the inputs and outputs of ``module``, and make its body ``steps``, in that order.

    A step reads what the latest step before it made, so an op that appears twice runs twice. ``results``
    are the values that the module returns. Metadata (``val``, stack traces, module names) is copied with
    each node, and the place of its step is added. The tuple of a multi-output op is taken apart right
    after it, so that nothing holds it any longer.

    What several steps compute on their way, from the same values, each has for itself, so that it is never
    written. If ``shared`` it is there once: a compiler may write it for all of them. Kernels are parted
    before steps whose numbers are ``parted``.
    """
    old, new = module.graph, fx.Graph()
    joint_nodes = {n.name: n for n in joint.graph.nodes}
    inputs = {joint_nodes[n.name]: new.node_copy(n) for n in old.nodes if n.op in ("placeholder", "get_attr")}
    latest = {v: inputs[n] for v, n in enumerate(captured.value_nodes) if n in inputs}
    steps = list(steps)
    known: dict[Hashable, fx.Node] = {}
    for i, place in zip(steps, _places(captured, steps, parted), strict=True):
        op = captured.graph.ops[i]
        local = {captured.value_nodes[v]: latest[v] for v in op.inputs}
        on_the_way = set(captured.nodes[i]) - _own(captured, i) if shared and captured.kernels else ()
        for node in captured.nodes[i]:
            reads = map(local.__getitem__, node.all_input_nodes)
            what = (node, *(reads if node in on_the_way else place))
            if what not in known:
                known[what] = new.node_copy(node, local.__getitem__)
                known[what].meta[STEP] = place
            local[node] = known[what]
        made = {v: local[n] for v in op.outputs if (n := captured.value_nodes[v]) in local}
        if captured.kernels and i not in captured.graph.views:
            for node in made.values():
                compat.write_out(node)
        latest.update(made)
    returned = {captured.value_nodes[v]: latest[v] for v in results if v in latest}
    (output,) = old.find_nodes(op="output")
    new_output = new.node_copy(
        output, lambda n: returned.get(joint_nodes[n.name]) or inputs[joint_nodes[n.name]]
    )
    new_output.meta = output.meta
    _drop_unread(new)
    new.lint()
    module.graph = new
    module.recompile()


def _own(captured: Capture, op: int) -> set[fx.Node | None]:
    """The nodes of what ``op`` makes, of all that it computes the last. None stands in for a dead value."""
    made = [captured.value_nodes[v] for v in captured.graph.ops[op].outputs]
    tuples = (before for n in made if n and "getitem" in n.name for before in n.all_input_nodes)
    return {*made, *tuples}


def _places(captured: Capture, steps: list[int], parted: Container[int]) -> Iterator[Place]:
    """The place of each step: those one after the other that one kernel computed are in one again.

    They are not where that is ``parted``.
    Without knowledge of kernels all are in one: whatever is lowered then fuses as it likes.
    """
    kernel, group, of, views = 0, 0, captured.kernels, captured.graph.views
    last = next((of[i] for i in steps if of and i not in views), None)
    for position, i in enumerate(steps):
        if of and i not in views:
            group += position in parted
            kernel += of[i] != last or position in parted
            last = of[i]
        yield Place(position, kernel, group)


def _drop_unread(graph: fx.Graph) -> None:
    """Take out the getitems that nobody reads: they would keep their output alive for nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "getitem" in node.name and not node.users:
            graph.erase_node(node)
