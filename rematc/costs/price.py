"""The cost table: one `OpCost` for each distinct op, filled by the roofline and by measuring."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from rematc.costs.call import Call
from rematc.costs.rates import Rates
from rematc.costs.roofline import is_free, runtime_ns
from rematc.costs.workspace import workspaces
from rematc.problem import OpCost


def price(nodes: Sequence[fx.Node], rates: Rates, *, measure_workspace: bool) -> tuple[OpCost, ...]:
    """One `OpCost` for each of ``nodes``; equal ops (target, shapes, dtypes, strides) cost the same.

    ``measure_workspace``: run each distinct op once on made-up data, and see what it allocates
    besides its results.
    """
    keys = [None if is_free(node) else Call.of(node).key for node in nodes]
    first = {key: node for key, node in reversed(list(zip(keys, nodes, strict=True))) if key is not None}
    workspace = workspaces(map(Call.of, first.values())) if measure_workspace else {}
    table = {key: OpCost(runtime_ns(node, rates), workspace.get(key, 0)) for key, node in first.items()}
    return tuple(OpCost(0) if key is None else table[key] for key in keys)
