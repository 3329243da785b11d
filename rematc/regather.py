"""What ranks share may be gathered again wherever a plan reads it: then it is never kept.

Where a user asks for it (`regather=`), the ops that gather parameters in the graph have no pin, and cost
nothing: no plan can do without them. A solver that does not know of ranks may still keep what they gather,
as that costs nothing either. Here it is taken out of a plan, and gathered where that first reads it.
"""

from __future__ import annotations

from dataclasses import replace

from rematc.graph import COLLECTIVES, Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.schedule import saving
from rematc.simulate import judged

READS_SHARED = "shared: reads parameters that ranks share, which are not kept for it"  # a pin


def gathered_again(problem: Problem, plan: Plan) -> Plan:
    """``plan`` without what ranks share among the values that it saves.

    >>> from rematc.graph import Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("shard whole dy dx".split())),
    ...           (Op("all_gather", "_c10d_functional.all_gather_into_tensor", (0,), (1,)),
    ...            Op("h", "mul", (1, 2), (3,), phase="backward")), (0,), (2,), (), (3,))
    >>> gathered_again(Problem(g, (OpCost(0),) * 2), Plan(saved=(1,), backward=(1,))).backward
    (0, 1)
    """
    whole = shared(problem.graph)
    less = saving(problem.graph, plan, tuple(v for v in plan.saved if v not in whole))
    return judged(problem, replace(less, digest=""))


def advice(graph: Graph) -> str:
    """What else to try where nothing fits, as the beginning of a list."""
    return "regather=True, " if any(op.pin == READS_SHARED for op in graph.ops) else ""


def without_price(problem: Problem) -> Problem:
    """``problem`` in which what ranks share costs no time to make: it has to be made in each pass anyway."""
    whole = shared(problem.graph)
    if not whole:
        return problem
    each = zip(problem.graph.ops, problem.costs, strict=True)
    costs = (replace(cost, runtime_ns=0) if whole.issuperset(op.outputs) else cost for op, cost in each)
    return replace(problem, costs=tuple(costs))


def shared(graph: Graph) -> frozenset[int]:
    """Values that are gathered from what is resident, by ops without a pin, or computed from such alone."""
    found: set[int] = set()
    there = set(graph.inputs)
    for i in graph.forward:
        op = graph.ops[i]
        sources = set(op.inputs)
        if not sources or op.pin:
            continue
        gathers = op.target.partition(".")[0] in COLLECTIVES and sources <= there
        if gathers or sources <= found:
            found.update(op.outputs)
        elif sources <= there:
            there.update(op.outputs)
    return frozenset(found)
