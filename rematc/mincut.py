"""What to save by minimum cut: the idea of torch's default partitioner, on storages and bytes.

As in torch's `min_cut_rematerialization_partition`: capacities are bytes; only pointwise ops
and views may be recomputed; products, convolutions, reductions, attention and random ops are banned.

Not torch's own. It knows no fusion, so it bans neither what would be materialized anyway (but for what
is wanted: see `rematc.unlimited`) nor long chains of fusible ops, and adds no cost for distance. Its nodes
are storages, so that a view never counts twice. Where torch orders the backward graph by its own rules,
`rematc.baselines.min_cut` recomputes each value right before its first use.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx

from rematc.graph import Graph, Op
from rematc.layers import read_in_backward

_CHEAP_NAMES = """
    abs acos add addcdiv addcmul alias arange asin atan atan2 bitwise_and bitwise_not bitwise_or
    bitwise_xor cat ceil clamp clamp_max clamp_min clone constant_pad_nd convert_element_type copysign
    cos cosh detach div elu empty empty_like eq erf erfc exp exp2 expand expm1 fill floor fmod full
    full_like ge gelu gt hardsigmoid hardswish hardtanh iota isinf isnan le leaky_relu lerp log log10
    log1p log2 logical_and logical_not logical_or lt masked_fill maximum minimum mul ne neg ones
    ones_like permute pow reciprocal relu remainder rsqrt rsub scalar_tensor select sigmoid sign silu
    sin sinh slice split sqrt square squeeze sub t tan tanh threshold to_copy transpose trunc unsqueeze
    view where zeros zeros_like
"""
CHEAP = frozenset(_CHEAP_NAMES.split())


def cheapest_cut(graph: Graph, wanted: Iterable[int] = ()) -> frozenset[int]:
    """The storages to save: those of fewest bytes from which cheap ops give all that backward reads.

    A storage s is an edge in_s -> out_s of capacity bytes(s) (0 if resident); an op joins out_u -> in_s for
    each u that it reads and each s that it makes, without limit. What can't be recomputed hangs on the
    source, as do the values that are ``wanted``; what backward reads hangs on the sink. Raises nothing: the
    cut is never infinite.

    >>> from rematc.graph import Op, Value
    >>> g = Graph((0, 8, 4, 8, 1, 1), tuple(Value(n, s) for s, n in enumerate("x a b c dy dx".split())),
    ...           (Op("f", "aten.mm.default", (0,), (1,)), Op("g", "aten.mm.default", (1,), (2,)),
    ...            Op("h", "aten.exp.default", (2,), (3,)),
    ...            Op("k", "aten.mul.Tensor", (3, 4), (5,), phase="backward")), (0,), (4,), (3,), (5,))
    >>> cheapest_cut(g)
    frozenset({2})
    """
    net = networkx.DiGraph()
    of = [v.storage for v in graph.values]
    for s in sorted({of[v] for i in graph.forward for v in graph.ops[i].outputs} | graph.resident):
        net.add_edge(("in", s), ("out", s), capacity=0 if s in graph.resident else graph.storage_bytes[s])
    for s in sorted(graph.resident.union(of[v] for v in wanted)):
        net.add_edge("source", ("in", s))
    for v in read_in_backward(graph):
        net.add_edge(("out", of[v]), "sink")
    for i in graph.forward:
        _add_op(net, graph, i, of)
    if "source" not in net or "sink" not in net:
        return frozenset()
    _, (near, _) = networkx.minimum_cut(net, "source", "sink")
    return frozenset(s for s in sorted({*of}) if ("in", s) in near and ("out", s) not in near)


def constants(graph: Graph) -> frozenset[int]:
    """The values that cheap ops make of nothing: a compiler has them within the kernels that read them.

    >>> from rematc.graph import Op, Value
    >>> g = Graph((0, 8, 8, 8), tuple(Value(n, s) for s, n in enumerate("x a b c".split())),
    ...           (Op("f", "aten.full.default", (), (1,)), Op("g", "aten.exp.default", (1,), (2,)),
    ...            Op("h", "aten.add.Tensor", (0, 2), (3,))), (0,), outputs=(3,))
    >>> sorted(constants(g))
    [1, 2]
    """
    found: set[int] = set()
    for op in (graph.ops[i] for i in graph.forward):
        if is_cheap(op) and op.pin is None and op.needed is None and found.issuperset(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def _add_op(net: networkx.DiGraph, graph: Graph, index: int, of: list[int]) -> None:
    op = graph.ops[index]
    reads = sorted({of[v] for v in op.inputs})
    banned = not is_cheap(op) or op.pin is not None or op.needed is not None
    for s in sorted({of[v] for v in op.outputs}.difference(reads)):
        net.add_edges_from((("out", u), ("in", s)) for u in reads)
        if banned or not reads:
            net.add_edge("source", ("in", s))


def is_cheap(op: Op) -> bool:
    """Is it pointwise, or a view?"""
    return base_name(op.target) in CHEAP


def base_name(target: str) -> str:
    """The bare name of an op.

    >>> base_name("aten.add.Tensor"), base_name("aten._to_copy.default"), base_name("sin")
    ('add', 'to_copy', 'sin')
    """
    parts = target.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_")
