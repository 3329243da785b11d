"""The cost table: one `OpCost` for each distinct op, filled by the roofline and by measuring."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.costs.rates import Rates
from rematc.costs.roofline import is_free, runtime_ns
from rematc.costs.workspace import workspaces
from rematc.problem import OpCost

Table = dict[Hashable, OpCost]


def price(nodes: Sequence[fx.Node], rates: Rates, *, measure_workspace: bool) -> tuple[OpCost, ...]:
    """One `OpCost` for each of ``nodes``; equal ops (target, shapes, dtypes, strides) cost the same.

    ``measure_workspace``: run each distinct op once on made-up data, and see what it allocates
    besides its results.
    """
    first: dict[Hashable, fx.Node] = {}
    for node in nodes:
        if not is_free(node):
            first.setdefault(key_of(node), node)
    workspace = workspaces(first) if measure_workspace else {}
    table: Table = {
        key: OpCost(runtime_ns(node, rates), workspace.get(key, 0)) for key, node in first.items()
    }
    free = OpCost(0)
    return tuple(free if is_free(n) else table[key_of(n)] for n in nodes)


def key_of(node: fx.Node) -> Hashable:
    """What the cost of an op depends on: its target, and each argument's shape, dtype and strides."""

    def part(arg: Any) -> Hashable:
        if isinstance(arg, fx.Node):
            return part(arg.meta.get("val"))
        if isinstance(arg, torch.Tensor):
            sizes = tuple(compat.hint(s) for s in (*arg.shape, *arg.stride()))
            return ("tensor", sizes, str(arg.dtype), str(arg.device))
        if isinstance(arg, tuple | list):
            return tuple(part(a) for a in arg)
        if isinstance(arg, dict):
            return tuple((k, part(v)) for k, v in arg.items())
        return str(arg)

    return (str(node.target), part(node.args), part(node.kwargs))
