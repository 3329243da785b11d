"""The plan where there is no limit: as fast as the inner compiler alone, and no larger than that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rematc.baselines import min_cut
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.schedule import just_in_time
from rematc.simulate import judged
from rematc.solve.order import Order, orders, reordered, restored


def unlimited(problem: Problem, wanted: Iterable[int] = ()) -> Plan:
    """What `min_cut` saves, the ``wanted`` included, with backward in the order of the lowest peak.

    Inductor alone orders its kernels for memory too; those of a plan stay in the plan's order.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 4, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a dy dx dw".split())),
    ...           (Op("f", "aten.mm.default", (0,), (1,)),
    ...            Op("h", "aten.mm.default", (2,), (3,), phase="backward"),
    ...            Op("k", "aten.mm.default", (1, 2), (4,), phase="backward")), (0,), (2,), (), (3, 4))
    >>> unlimited(Problem(g, (OpCost(0),) * 3)).saved
    (1,)
    """
    plan = min_cut(problem, wanted=wanted)

    def ordered(order: Order) -> Plan:
        same = reordered(problem, order)
        steps = just_in_time(same.graph, plan.saved)
        return restored(judged(same, replace(plan, backward=steps)), order, problem)

    return min(map(ordered, orders(problem)), key=lambda each: each.peak_bytes)
