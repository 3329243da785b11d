"""Time of an op from its FLOPs and its bytes: the longer of the two, and the time to start it.

The roofline model (Williams, Waterman, Patterson 2009), with the device's own rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from rematc import compat
from rematc.costs.rates import Rates
from rematc.storages import tensors

SLOW = 0.5  # of the memory's rate
SPECIAL = ("exp", "erf", "gelu", "silu", "tanh", "sigmoid", "sin", "cos", "log", "pow", "mish", "softplus")
REDUCE = ("softmax", "norm", "sum", "mean", "var", "amax", "amin", "argmax", "max_pool", "avg_pool", "nll")
GATHER = ("embedding", "index", "gather", "scatter", "dropout_backward", "sort", "topk")
RANDOM = ("dropout", "rand", "bernoulli")
STRIDED = ("clone", "cat", "copy", "constant_pad", "contiguous", "stack", "upsample")


def runtime_ns(node: fx.Node, rates: Rates) -> int:
    """Nanoseconds for one run of ``node``; 0 for what moves no bytes (views, sizes)."""
    if is_free(node):
        return 0
    name = str(node.target)
    moved = bytes_moved(node)
    seconds = max(flops(node) / _flop_rate(node, name, rates), moved / _byte_rate(name, rates))
    return int(rates.overhead_ns + seconds * 1e9)


def kernel_ns(
    nodes: Sequence[fx.Node],
    values: Sequence[fx.Node | None],
    rates: Rates,
    time_of: Callable[[fx.Node], int] | None = None,
) -> int:
    """Nanoseconds for one kernel that computes ``nodes``, and reads and writes ``values`` alone.

    Products, convolutions and attention are kernels of their own: ``time_of`` knows their time, if it was
    measured. What the others do within a kernel costs no traffic: the memory is read once and written
    once, or the slow functions take longer. What alone is nearly as fast as memory is not slow: how fast it
    would be without is not known.
    """
    time_of = time_of or partial(runtime_ns, rates=rates)
    working = [n for n in nodes if not is_free(n)]
    alone = [time_of(n) for n in working if flops(n)]
    fused = [n for n in working if not flops(n)]
    if not fused:
        return sum(alone)
    moved = sum(_nbytes(t) for n in values if n is not None for t in tensors(n.meta.get("val")))
    slow = [n for n in fused if _byte_rate(str(n.target), rates) < SLOW * rates.stream]
    computed = sum(bytes_moved(n) / _byte_rate(str(n.target), rates) for n in slow)
    return int(sum(alone) + rates.overhead_ns + max(moved / rates.stream, computed) * 1e9)


def is_free(node: fx.Node) -> bool:
    """Does the op make no memory of its own: a view, a size, Python arithmetic?"""
    if not compat.is_overload(node.target):
        return not compat.is_higher_order(node.target)
    outputs = [t for t in tensors(node.meta.get("val"))]
    if not outputs:
        return True
    if compat.schema(node.target).is_mutable:
        return False
    before = {compat.storage_key(t) for n in node.all_input_nodes for t in tensors(n.meta.get("val"))}
    return all(compat.storage_key(t) in before for t in outputs)


def flops(node: fx.Node) -> int:
    """Floating-point operations, by torch's flop counter; 0 where it has no formula."""
    if not compat.is_overload(node.target):
        return 0
    args: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if "_scaled_dot_product" in str(node.target) and "backward" not in str(node.target):
        return int(sdpa_flop_count(*(_shape(t) for t in args[:3])))
    formula = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def bytes_moved(node: fx.Node) -> int:
    """Bytes read and written: every input once, every output once."""
    read = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
    return sum(_nbytes(t) for t in (*read, *tensors(node.meta.get("val"))))


def _flop_rate(node: fx.Node, name: str, rates: Rates) -> float:
    read = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
    faster = rates.times(read[0].dtype) if read else 1.0
    if "conv" in name:
        return rates.conv * faster
    return (rates.attention if "scaled_dot_product" in name else rates.matmul) * faster


def _byte_rate(name: str, rates: Rates) -> float:
    op = name.removeprefix("aten.").lstrip("_")
    for words, rate in (
        (REDUCE, rates.reduce),
        (SPECIAL, rates.special),
        (GATHER, rates.gather),
        (RANDOM, rates.random),
        (STRIDED, rates.strided),
    ):
        if any(w in op for w in words):
            return rate
    return rates.stream


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(compat.hint(s) for s in tensor.shape)


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(_shape(tensor)) * tensor.element_size()
