"""Say a view by its shape where it was said by its strides, which a compiler may change."""

from __future__ import annotations

import torch
from torch import fx

from rematc import compat

AS_STRIDED, VIEW = torch.ops.aten.as_strided.default, torch.ops.aten.view.default


def as_views(joint: fx.GraphModule) -> None:
    """Make a `view` of each ``as_strided`` that takes all of a contiguous tensor, in order, in another shape.

    It is the same on the strides of the trace. Between forward and backward Inductor hands values over with
    the strides that it chose (the channels last), and ``as_strided`` would read them in another order: so
    torch's GroupNorm came out with wrong gradients, which reshapes its weights by it. What is read by its
    strides is written, and stays so: else each kernel that reads the view computes a GroupNorm's weights anew,
    reads too much by that for Inductor's taste, and has its own large result written.
    """
    for node in joint.graph.find_nodes(op="call_function", target=AS_STRIDED):
        given, made = node.args[0].meta.get("val"), node.meta.get("val")
        if _is_all_in_order(given, made):
            compat.write_out(node.args[0])
            node.target, node.args, node.kwargs = VIEW, (node.args[0], list(made.shape)), {}


def _is_all_in_order(given: object, made: object) -> bool:
    if not (isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor)):
        return False
    if not all(isinstance(size, int) for size in (*given.shape, *made.shape)):
        return False
    is_same = given.numel() == made.numel() and given.storage_offset() == made.storage_offset()
    return is_same and given.is_contiguous() and made.is_contiguous()
