"""Bring the joint graph into the shape that is planned for."""

from __future__ import annotations

from torch import fx

from rematc import compat
from rematc.passes.snapshot import snapshot


def canonicalize(joint: fx.GraphModule, num_fwd_outputs: int) -> fx.GraphModule:
    """Drop dead ops, merge equal ones, and keep the old values of inputs that forward overwrites.

    ``joint`` is changed in place and returned, linted after every step.
    """
    joint.graph.eliminate_dead_code()
    joint.graph = compat.common_subexpressions(joint.graph)
    joint.graph.lint()
    snapshot(joint, num_fwd_outputs)
    joint.graph.lint()
    joint.recompile()
    return joint
