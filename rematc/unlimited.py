"""The plan where there is no limit: as fast as Inductor alone, and no larger than it need be for that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rematc.baselines import min_cut
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.regather import gathered_again, shared
from rematc.schedule import just_in_time
from rematc.simulate import judged, simulate
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
    plan = gathered_again(problem, plan) if shared(problem.graph) else plan

    def ordered(order: Order) -> Plan:
        steps = just_in_time(reordered(problem, order).graph, plan.saved)
        return restored(replace(plan, backward=steps), order, problem)

    return judged(
        problem, min(map(ordered, orders(problem)), key=lambda each: simulate(problem, each).peak_bytes)
    )
