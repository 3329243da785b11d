"""Say by its shape what is read by its strides, which a compiler may change."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.storages import fake_mode_of

AS_STRIDED, SCATTER = torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default
VIEW, PERMUTE = torch.ops.aten.view.default, torch.ops.aten.permute.default


def by_shapes(joint: fx.GraphModule) -> None:
    """Have ``as_strided`` and ``as_strided_scatter`` read flat views, made of their tensors by their shapes.

    It is the same on the strides of the trace. Between forward and backward Inductor hands values over with
    the strides that it chose (the channels last), and ``as_strided`` would read them in another order: so
    torch's GroupNorm came out with wrong gradients, which reshapes its weights by it.
    """
    for node in joint.graph.find_nodes(op="call_function", target=SCATTER):
        source = node.args[0]
        if _is_dense(source.meta.get("val")) and source.meta["val"].is_contiguous():
            _scatter_flat(node, source)
    for node in joint.graph.find_nodes(op="call_function", target=AS_STRIDED):
        if _is_static(node.meta.get("val")):
            source = _whole(node)
            if _is_dense(source.meta.get("val")):
                _read_flat(node, source)


def _read_flat(node: fx.Node, source: fx.Node) -> None:
    given, read = source.meta["val"], node.meta["val"]
    if given.is_contiguous() and read.is_contiguous() and given.numel() == read.numel():
        # What was read by its strides was written. Were it computed in each kernel that reads the view,
        # these read too much for Inductor's taste: it has their own large results written instead.
        compat.write_out(source)
        node.target, node.args, node.kwargs = VIEW, (source, list(read.shape)), {}
    else:
        offset = read.storage_offset()  # of the storage, whatever view of it was read
        node.args, node.kwargs = (_flat(source, node), *node.args[1:3], offset), {}


def _scatter_flat(node: fx.Node, source: fx.Node) -> None:
    users = list(node.users)
    node.update_arg(0, _flat(source, node))
    node.meta["val"] = node.meta["val"].view(-1)
    with node.graph.inserting_after(node):
        shaped = made(VIEW, node, list(source.meta["val"].shape), like=node)
    for user in users:
        user.replace_input_with(node, shaped)


def _whole(node: fx.Node) -> fx.Node:
    """What all of the storage was made as that ``node`` is a view of, in the same numbers."""
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        viewed, view = node.args[0].meta.get("val"), node.meta["val"]
        if not isinstance(viewed, torch.Tensor) or _numbers(viewed) != _numbers(view):
            break
        node = node.args[0]
    return node


def _numbers(x: torch.Tensor) -> tuple[object, ...]:
    """What says how the bytes of a storage are read."""
    return compat.storage_key(x), x.dtype, x.is_conj(), x.is_neg()


def _flat(source: fx.Node, reader: fx.Node) -> fx.Node:
    """A view of the elements of ``source`` as they lie in memory, for ``reader``."""
    order = order_of(source.meta["val"])
    with reader.graph.inserting_before(reader):
        if order != sorted(order):
            source = made(PERMUTE, source, order, like=reader)
        return made(VIEW, source, [-1], like=reader)


def made(target: Any, source: fx.Node, *arguments: Any, like: fx.Node, **settings: Any) -> fx.Node:
    """A node that computes from ``source``, where nodes are inserted now. All but its value is ``like``'s."""
    node = source.graph.call_function(target, (source, *arguments), settings)
    node.meta = {key: value for key, value in like.meta.items() if key != "val"}
    with fake_mode_of([source.meta["val"]]), torch.no_grad():
        node.meta["val"] = target(source.meta["val"], *arguments, **settings)
    return node


def _is_dense(x: Any) -> bool:
    """Are its elements all that its storage holds, each once?"""
    if not _is_static(x) or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        return False
    return x.storage_offset() == 0 and x.permute(order_of(x)).is_contiguous()


def _is_static(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and all(isinstance(n, int) for n in (*x.shape, *x.stride()))


def order_of(x: torch.Tensor) -> list[int]:
    """Its dimensions, that of the largest stride first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], -x.shape[d]))
