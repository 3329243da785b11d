"""Rewrite a module's body as a list of steps, each a copy of a node of the joint graph."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from rematc.capture import Capture


def replay(module: fx.GraphModule, joint: fx.GraphModule, captured: Capture, steps: Iterable[int]) -> None:
    """Keep the inputs and outputs of ``module``, and make its body ``steps``, in that order.

    A step reads what the latest step before it made, so an op that appears twice runs twice.
    Metadata (``val``, stack traces, module names) is copied with each node. The tuple of a
    multi-output op is taken apart right after it, so that nothing holds it any longer.
    """
    old, new = module.graph, fx.Graph()
    joint_nodes = {n.name: n for n in joint.graph.nodes}
    latest: dict[fx.Node, fx.Node] = {}
    for node in old.nodes:
        if node.op == "placeholder" or node.op == "get_attr":
            latest[joint_nodes[node.name]] = new.node_copy(node)
    for i in steps:
        for node in (captured.op_nodes[i], *captured.getitems[i]):
            latest[node] = new.node_copy(node, latest.__getitem__)
    (output,) = old.find_nodes(op="output")
    new_output = new.node_copy(output, lambda n: latest[joint_nodes[n.name]])
    new_output.meta = output.meta
    _drop_unread(new)
    new.lint()
    module.graph = new
    module.recompile()


def _drop_unread(graph: fx.Graph) -> None:
    """Take out the getitems that nobody reads: they would keep their output alive for nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "getitem" in node.name and not node.users:
            graph.erase_node(node)
