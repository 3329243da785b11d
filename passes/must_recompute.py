"""What must be recomputed: the backward pass reads copies, of its own.

Policies of selective checkpointing in the model ask for it, and parameters that ranks share (`gathered`).
With copies among the backward ops nothing is left to decide: each runs once, in the backward pass, from what
its region was given. What a region returns, random ops, and others that may not run twice are left to the
plan.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from rematc import compat
from rematc.capture import CHECKPOINTED, IN_BACKWARD, READS_WHOLE, must_run, pin_of
from rematc.passes.gathered import gathered
from rematc.passes.snapshot import ancestors
from rematc.storages import fake_mode_of

REGION = "ac_graph_id"  # torch's meta key of the region under `torch.utils.checkpoint` that a node is of


def must_recompute(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Give backward copies of the forward ops that must be recomputed."""
    whole = gathered(joint)
    if not whole and not any(_is_asked_for(n) for n in joint.graph.nodes):
        return
    (output,) = joint.graph.find_nodes(op="output")
    results = [n for n in output.args[0][:num_fwd_outputs] if isinstance(n, fx.Node)]
    backward = _after_tangents(joint)
    effects = [n for n in joint.graph.nodes if n.op == "call_function" and must_run(n) and n not in backward]
    forward = ancestors([*results, *effects])
    copied: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node in forward:
            is_asked = node in whole or (_is_asked_for(node) and _stays_inside(node, forward))
            is_copied = is_asked and node not in results
        else:  # what else is made of those, for the backward pass alone
            reads = copied.intersection(node.all_input_nodes)
            is_copied = bool(reads) and node.op == "call_function" and node not in backward
        if is_copied:
            copied.add(node)
    copier = _Copier(joint, copied)
    for node in [n for n in joint.graph.nodes if n in backward or n is output]:
        copier.redirect(node)
    for node in {reader for n in whole for reader in n.users} - whole - backward:
        node.meta[READS_WHOLE] = True


def _after_tangents(joint: fx.GraphModule) -> set[fx.Node]:
    found = {n for n in joint.graph.find_nodes(op="placeholder") if compat.is_tangent(n)}
    for node in joint.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class _Copier:
    """Copies ``nodes`` of the joint graph, each where it is first read."""

    def __init__(self, joint: fx.GraphModule, nodes: set[fx.Node]) -> None:
        self.graph, self.nodes = joint.graph, nodes
        self.copies: dict[fx.Node, fx.Node] = {}
        inputs = joint.graph.find_nodes(op="placeholder")
        self.mode = fake_mode_of([n.meta.get("val") for n in inputs])

    def redirect(self, reader: fx.Node) -> None:
        """``reader``, of the backward pass, reads copies from now on."""
        for node in reader.all_input_nodes:
            if node in self.nodes:
                reader.replace_input_with(node, self._copied(node, reader))

    def _copied(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        if node in self.copies:
            return self.copies[node]
        sources = {n: self._copied(n, reader) for n in node.all_input_nodes if n in self.nodes}
        with self.graph.inserting_before(reader):
            copy = self.graph.node_copy(node, lambda n: sources.get(n, n))
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():  # memory of its own
            copy.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        copy.meta[IN_BACKWARD] = True
        self.copies[node] = copy
        return copy


def _is_asked_for(node: fx.Node) -> bool:
    """Must it be recomputed, as its policy says, or what it is taken out of?"""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    is_asked = source.meta.get(CHECKPOINTED) is CheckpointPolicy.MUST_RECOMPUTE
    return is_asked and source.op == "call_function" and not must_run(source) and not pin_of(source)


def _stays_inside(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Is it read by its own region alone, as far as the forward pass goes?"""
    readers = [reader for reader in node.users if reader in forward]
    region = node.meta.get(REGION)
    return all(reader.target is operator.getitem or reader.meta.get(REGION) == region for reader in readers)
