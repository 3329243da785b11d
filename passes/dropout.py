"""Dropout as two ops: one draws which elements stay, and runs once; the other drops, and may run again.

As one op it can't be recomputed, for it draws; what it returns would be saved, beside the mask that backward
reads. On a CPU, in single and double precision and on contiguous memory, the two have its bits, and leave the
generator where it does. What is rounded to half precision is rounded in other places, and stays one op.
Under Inductor there is such an op only where its ``fallback_random`` has it draw what eager PyTorch does.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from rematc.storages import fake_mode_of

aten = torch.ops.aten


def split_dropout(joint: fx.GraphModule, *, for_inductor: bool = False) -> None:
    """Take each dropout apart that can be; ``for_inductor`` by products, which that has code for."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        if _has_the_same_bits(node):
            _split(joint.graph, node, for_inductor)


def _has_the_same_bits(node: fx.Node) -> bool:
    source, p, train = node.args
    val = source.meta.get("val") if isinstance(source, fx.Node) else None
    return (
        isinstance(val, torch.Tensor)
        and val.device.type == "cpu"
        and val.dtype in (torch.float32, torch.float64)
        and val.is_contiguous()
        and isinstance(p, float)
        and train is not False
        and all(user.target is operator.getitem for user in node.users)
    )


def _split(graph: fx.Graph, node: fx.Node, for_inductor: bool) -> None:
    source, p, _ = node.args
    assert isinstance(p, float)
    scale = 1 / (1 - p) if p < 1 else 0.0
    with graph.inserting_before(node):
        blank = graph.call_function(aten.empty_like.default, (source,), {"dtype": torch.bool})
        stays = graph.call_function(aten.bernoulli.p, (blank, 1 - p))
        masked = [graph.call_function(aten.mul.Tensor, (source, stays))] if for_inductor else []
        drop = aten.mul.Tensor if for_inductor else aten.native_dropout_backward.default
        of = masked or (source, stays)
        dropped = graph.create_node("call_function", drop, (*of, scale), name="dropout")
    for made in (blank, stays, *masked, dropped):
        made.meta = {key: value for key, value in node.meta.items() if key != "val"}
        args, kwargs = fx.map_arg((made.args, made.kwargs), lambda n: n.meta["val"])
        with fake_mode_of(args), torch.no_grad():
            made.meta["val"] = made.target(*args, **kwargs)  # type: ignore[operator]
    for taker in list(node.users):
        made = (dropped, stays)[taker.args[1]]  # type: ignore[index]
        made.meta["val"] = taker.meta["val"]  # views of it are on this memory
        taker.replace_all_uses_with(made)
        graph.erase_node(taker)
    graph.erase_node(node)
