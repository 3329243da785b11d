"""From a set of saved values to backward steps: every recomputation right before its first use."""

from __future__ import annotations

from collections.abc import Iterable

from rematc.graph import Graph


def just_in_time(graph: Graph, saved: Iterable[int]) -> tuple[int, ...]:
    """Backward steps that recompute each missing value once, as late as can be.

    >>> from rematc.graph import Op, Value
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> just_in_time(g, saved=()), just_in_time(g, saved=(1,))
    ((0, 2), (2,))
    """
    at_hand = {*graph.inputs, *graph.tangents, *saved}
    steps: list[int] = []
    wanted = [(graph.ops[b].inputs, (b,)) for b in graph.backward_steps]
    # A gradient may be a forward value that no backward op reads: it too is recomputed, at the end.
    for inputs, then in [*wanted, (graph.gradients, ())]:
        missing = [v for v in inputs if v not in at_hand]
        before = sorted(graph.ancestors(missing, stop=at_hand)) if missing else ()
        for op in (*before, *then):
            steps.append(op)
            at_hand.update(graph.ops[op].outputs)
    return tuple(steps)
