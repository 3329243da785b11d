"""Plans of one graph to choose from where it is not alone: small while it runs, or small while others do.

What a graph keeps between its forward and its backward pass is there while other graphs of the step run. To
have plans that keep little, the problem gets one more backward op, the first, that takes as much as the
others might: no plan can do with a budget that its peak, or what it keeps and that op, exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rematc.errors import BudgetError
from rematc.graph import Op, Value
from rematc.options import SolveOptions
from rematc.pareto import spread
from rematc.plan import Plan
from rematc.problem import OpCost, Problem
from rematc.simulate import judged
from rematc.solve import solve

PEAKS, KEPT = 3, 5  # so many steps from the smallest peak to the largest, and from least kept to most


def choices(problem: Problem, solve_options: SolveOptions) -> tuple[Plan, ...]:
    """Plans for ``problem``, its budget aside: from one that saves all to those of least peak and least kept.

    Each search has its part of the time limit.

    >>> from rematc.graph import Graph, Value
    >>> g = Graph((0, 8, 8, 1, 1), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("back", "mul", (3, 1), (4,), "backward")), (0,), (3,), (2,), (4,), (3,))
    >>> [(plan.peak_bytes, plan.saved) for plan in choices(Problem(g, (OpCost(5),) * 3), SolveOptions())]
    [(18, (1,)), (18, ())]
    """
    problem = problem.with_budget(None)
    options = replace(solve_options, time_limit_s=solve_options.time_limit_s / (2 + PEAKS * (2 + KEPT)))
    all_saved = solve(problem, options)
    found = {all_saved.saved: all_saved}
    for peak_bytes in reversed(spread(problem, PEAKS, options)):
        for plan in _keeping_less(problem, peak_bytes, options):
            found.setdefault(plan.saved, plan)
    return tuple(found.values())


def _keeping_less(problem: Problem, peak_bytes: int, options: SolveOptions) -> Iterator[Plan]:
    """Plans within ``peak_bytes``, from the cheapest to one that keeps as little as can be."""
    paused = _paused(problem, peak_bytes)  # with this much taken, the least that can be is what is kept
    for budget in reversed(spread(paused, KEPT, options)):
        taken = peak_bytes - (budget - peak_bytes)
        try:
            plan = solve(_paused(problem, max(0, taken)).with_budget(peak_bytes), options)
        except BudgetError:
            continue
        yield _resumed(problem, plan)


def _paused(problem: Problem, taken_bytes: int) -> Problem:
    """``problem`` with an op before all others of the backward pass that takes ``taken_bytes``."""
    graph, at = problem.graph, len(problem.graph.forward)
    go = len(graph.values)  # a value of no bytes that all others wait for
    pause = Op("meanwhile", "rematc.meanwhile", (), (go,), "backward", needed="other graphs run")
    waiting = (replace(op, inputs=(*op.inputs, go)) for op in graph.ops[at:])
    graph = replace(
        graph,
        storage_bytes=(*graph.storage_bytes, 0),
        values=(*graph.values, Value("go", len(graph.storage_bytes))),
        ops=(*graph.ops[:at], pause, *waiting),
    )
    costs = (*problem.costs[:at], OpCost(0, taken_bytes), *problem.costs[at:])
    return replace(problem, graph=graph, costs=costs)


def _resumed(problem: Problem, plan: Plan) -> Plan:
    """The plan without that op."""
    at = len(problem.graph.forward)
    backward = tuple(i - (i > at) for i in plan.backward if i != at)
    return judged(problem, replace(plan, backward=backward, digest=""))
