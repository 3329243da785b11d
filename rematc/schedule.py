"""From a set of saved values to backward steps: every recomputation right before its first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rematc.graph import Graph
from rematc.plan import Plan


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


def one_of_each_storage(graph: Graph, plan: Plan) -> Plan:
    """The same plan with one saved value at most for each storage; inputs are nobody's to overwrite.

    Of several, that is the one that the others are views of; those are taken again where they are first read.
    A compiler that is given two tensors on one memory may write to it through the one while the other is
    still to be read: Inductor does.

    >>> from rematc.graph import Op, Value
    >>> on = {"x": 0, "a": 1, "row": 1, "dy": 2, "dx": 3}
    >>> g = Graph((8, 8, 4, 8), tuple(Value(name, storage) for name, storage in on.items()),
    ...           (Op("f", "sin", (0,), (1,)), Op("v", "select", (1,), (2,)),
    ...            Op("h", "mul", (1, 2, 3), (4,), phase="backward")), (0,), (3,), (1,), (4,))
    >>> plan = one_of_each_storage(g, Plan(saved=(1, 2), backward=(2,)))
    >>> plan.saved, plan.backward
    ((1,), (1, 2))
    """
    storage = [value.storage for value in graph.values]
    count = Counter(storage[v] for v in plan.saved)
    owners: dict[int, list[int]] = {}  # several, where an op makes two values on one storage
    for i, op in enumerate(graph.ops):
        for v in op.outputs if i not in graph.views else ():
            owners.setdefault(storage[v], []).append(v)

    def owner(v: int) -> int:
        known = owners.get(storage[v], []) if count[storage[v]] > 1 else []
        views_of = (o for o in known if graph.ancestors([v], stop={*graph.inputs, o}) <= graph.views)
        return next(views_of, v)

    saved = tuple(dict.fromkeys(map(owner, plan.saved)))
    if saved == plan.saved:
        return plan
    return saving(graph, plan, saved)


def saving(graph: Graph, plan: Plan, saved: tuple[int, ...]) -> Plan:
    """The same plan with other saved values: what it misses then is made right before it is first read.

    >>> from rematc.graph import Op, Value
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> saving(g, Plan(saved=(1,), backward=(2,)), ()).backward
    (0, 2)
    """
    at_hand = {*graph.inputs, *graph.tangents, *saved}
    steps: list[int] = []
    for inputs, then in [*((graph.ops[i].inputs, (i,)) for i in plan.backward), (graph.gradients, ())]:
        again = graph.ancestors([v for v in inputs if v not in at_hand], stop=at_hand)
        for i in (*sorted(again), *then):
            steps.append(i)
            at_hand.update(graph.ops[i].outputs)
    return replace(plan, saved=saved, backward=tuple(steps))
