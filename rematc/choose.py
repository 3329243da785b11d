"""Plans of one graph to choose from where it is not alone: small while it runs, or small while others do.

What a graph keeps between its forward and its backward pass is there while other graphs of the step run. To
have plans that keep little, as much is taken meanwhile (`Problem.meanwhile_bytes`) as the others might: no
plan can do with a budget that its peak, or what it keeps and that, exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rematc import plans
from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.pareto import spread
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged
from rematc.solve import solve

PEAKS, KEPT = 3, 5  # so many steps from the smallest peak to the largest, and from least kept to most
MOST = 100  # plans that are kept for the next time


def choices(problem: Problem, solve_options: SolveOptions) -> tuple[Plan, ...]:
    """Plans for ``problem``, its budget aside: from one that saves all to those of least peak and least kept.

    Each search has its part of the time limit.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 1, 1), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("back", "mul", (3, 1), (4,), "backward")), (0,), (3,), (2,), (4,), (3,))
    >>> [(plan.peak_bytes, plan.saved) for plan in choices(Problem(g, (OpCost(5),) * 3), SolveOptions())]
    [(18, (1,)), (18, ())]
    """
    problem = problem.with_budget(None)
    limit_s = solve_options.for_ops(len(problem.graph.ops))
    options = replace(solve_options, time_limit_s=limit_s / (2 + PEAKS * (2 + KEPT)))
    all_saved = solve(problem, options)
    found = {all_saved.saved: all_saved}
    for peak_bytes in reversed(spread(problem, PEAKS, options)):
        for plan in _keeping_less(problem, peak_bytes, options):
            found.setdefault(plan.saved, plan)
    return tuple(found.values())


def choices_once(problem: Problem, options: SolveOptions, folder: Path) -> tuple[Plan, ...]:
    """`choices`, kept in ``folder``: who asks again searches no more.

    With other costs it is searched again, and what was found before may be chosen too: the smallest budget
    that a refusal named is that of a plan among them.
    """
    known, is_of_these_costs = plans.load_choices(problem, options, folder)
    if is_of_these_costs:
        return known
    found = {(plan.saved, plan.backward): plan for plan in (*choices(problem, options), *known)}
    plans.keep_choices(problem, options, chosen := tuple(found.values())[:MOST], folder)
    return chosen


def _keeping_less(problem: Problem, peak_bytes: int, options: SolveOptions) -> Iterator[Plan]:
    """Plans within ``peak_bytes``, from the cheapest to one that keeps as little as can be.

    A graph without backward steps is never between its passes.
    """
    if not problem.graph.backward_steps:
        return
    paused = _paused(problem, peak_bytes)  # with this much taken, the least that can be is what is kept
    for budget in reversed(spread(paused, KEPT, options)):
        taken = peak_bytes - (budget - peak_bytes)
        try:
            plan = solve(_paused(problem, max(0, taken)).with_budget(peak_bytes), options)
        except BudgetError:
            continue
        yield judged(problem, replace(plan, digest=""))


def _paused(problem: Problem, taken_bytes: int) -> Problem:
    """``problem`` with as much as that taken between the passes, if not more."""
    return replace(problem, meanwhile_bytes=max(problem.meanwhile_bytes, taken_bytes))
