"""Values lie in memory as ops really return them, which a trace does not always say.

A trace has an op's strides from a rule that stands beside its kernel, and some rules are wrong: that of
`mse_loss_backward` keeps the strides of its input, the kernel may return those of the target. What an op
takes while it runs depends on the strides that it gets, and a view may have none of what it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.costs import Call, Taken, is_free
from rematc.passes.strided import made
from rematc.storages import fake_mode_of, tensors

CLONE, CONTIGUOUS = torch.ops.aten.clone.default, torch.contiguous_format
Known = Callable[[Iterable[Call]], Mapping[Hashable, Taken]]


def lay_out(joint: fx.GraphModule, taken: Known) -> None:
    """Give values the strides that ops were seen to return, and all that is computed from them theirs.

    ``taken`` runs ops. A view that can't be had of what is really there is made of a copy of it.
    """
    calls = {n: Call.of(n) for n in joint.graph.nodes if n.op == "call_function" and not is_free(n)}
    known = taken(calls.values())
    others: set[fx.Node] = set()  # than in the trace
    for node in list(joint.graph.nodes):
        is_anew = node.op == "call_function" and not others.isdisjoint(node.all_input_nodes)
        if is_anew and _traced_anew(node, others, keeps=node in calls):
            others.add(node)
        if node in calls:
            call = Call.of(node) if is_anew else calls[node]
            found = (taken([call]) if is_anew else known).get(call.key)
            if found is not None and _differ(node.meta["val"], found.strides):
                node.meta["val"] = _relaid(node.meta["val"], found.strides)
                others.add(node)


def _traced_anew(node: fx.Node, others: set[fx.Node], *, keeps: bool) -> bool:
    """Is the value of ``node`` another now? ``keeps``: it is none where its strides are what they were."""
    if compat.is_higher_order(node.target):
        return False
    try:
        val = _value(node)
    except (RuntimeError, ValueError):
        for source in others.intersection(node.all_input_nodes):
            with node.graph.inserting_before(node):
                node.replace_input_with(source, made(CLONE, source, like=node, memory_format=CONTIGUOUS))
        return False
    if keeps and not _differ(node.meta["val"], [t.stride() for t in tensors(val)]):
        return False
    node.meta["val"] = val
    return True


def _value(node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with fake_mode_of(tensors((args, kwargs))), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _differ(val: Any, strides: Sequence[Sequence[int]]) -> bool:
    """Do tensors of such strides lie otherwise in memory?"""
    vals = list(tensors(val))
    return len(vals) == len(strides) and any(map(_differs, vals, strides))


def _differs(val: torch.Tensor, strides: Sequence[int]) -> bool:
    sizes, stride = (list(map(compat.hint, xs)) for xs in (val.shape, val.stride()))
    along = zip(sizes, stride, strides, strict=True)
    return 0 not in sizes and any(size > 1 and a != b for size, a, b in along)


def _relaid(val: Any, strides: Sequence[Sequence[int]]) -> Any:
    """The same values with ``strides``; what lies so already is left as it is."""
    given = iter(strides)

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not _differs(x, stride := next(given)):
            return x
        with fake_mode_of([x]):
            return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)

    return fx.node.map_aggregate(val, one)
