"""The trade-off between peak and cost: the best plan known at each of many budgets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rematc.errors import BudgetError, OptionError, PlanError
from rematc.options import Budget, SolveOptions, parse_budget
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import solve

DEFAULT = SolveOptions()


def pareto(
    problem: Problem,
    budgets: Iterable[Budget] | None = None,
    points: int = 12,
    options: SolveOptions = DEFAULT,
) -> tuple[Plan, ...]:
    """The cheapest plan found for each budget, by budget; the cost never rises with it.

    ``budgets`` as for `rematc.options.parse_budget`: bytes, "20GB", None for no limit; those for which no
    plan is found are left out, so the result may be empty. By default they are ``points`` budgets, evenly
    spaced in bytes from the smallest that `rematc.solve` accepts to the peak of the plan that recomputes
    nothing. The problem's own budget plays no part. Each is searched for ``options.time_limit_s`` at most.

    A plan found at one budget is used at every other that it fits, if it is cheaper there; it then
    carries that budget and a note. What is proven at a budget, that no plan costs less, holds at all
    smaller ones: ``bound_ns`` is the largest that applies. Every plan passes `rematc.validate` for
    ``problem.with_budget(plan.budget_bytes)``.

    Raises `OptionError` for a budget that can't be read or fewer than two points, and `PlanError` if a plan
    costs less than another search proved possible.

    Solving for one aim with a bound on the other is the epsilon-constraint method of Haimes, Lasdon and
    Wismer, "On a bicriterion formulation" (1971).

    >>> from networkx import DiGraph
    >>> dag = DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    >>> for node, size in zip("abcd", (10, 10, 10, 1)):
    ...     dag.add_node(node, bytes=size, runtime_ns=7)
    >>> for plan in pareto(Problem.from_networkx(dag), budgets=["1kB", 29, 20, 21, 30]):
    ...     print(plan.budget_bytes, plan.peak_bytes, plan.cost_ns)
    21 21 7
    29 21 7
    30 30 0
    1000 30 0
    """
    asked: Sequence[int | None]
    if budgets is None:
        asked = spread(problem, points, options)
    else:
        asked = sorted({parse_budget(b) for b in budgets}, key=_room)
    found = [plan for b in asked if (plan := _solved(problem.with_budget(b), options)) is not None]
    return tuple(plan for b in asked if (plan := _best(problem, b, found, options)) is not None)


def _room(budget_bytes: int | None) -> float:
    """The budget as a number to order by: no limit is above all."""
    return math.inf if budget_bytes is None else budget_bytes


def _words(budget_bytes: int | None) -> str:
    return "no limit" if budget_bytes is None else f"a budget of {budget_bytes} bytes"


def spread(problem: Problem, points: int, options: SolveOptions = DEFAULT) -> Sequence[int]:
    """``points`` budgets, evenly spaced from the smallest that can be met to where nothing is recomputed.

    The problem's own budget plays no part. Raises `OptionError` for fewer than two points.

    >>> from networkx import DiGraph
    >>> dag = DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    >>> for node, size in zip("abcd", (10, 10, 10, 1)):
    ...     dag.add_node(node, bytes=size, runtime_ns=7)
    >>> spread(Problem.from_networkx(dag), 3)
    [21, 25, 30]
    """
    if points < 2:
        raise OptionError(f"points={points!r}: give at least 2, for both ends of the curve")
    high = solve(problem.with_budget(None), options).peak_bytes
    try:
        low = solve(problem.with_budget(max(problem.base_bytes, 1)), options).peak_bytes
    except BudgetError as e:
        low = e.minimum_bytes
    return sorted({low + (high - low) * i // (points - 1) for i in range(points)})


def _solved(problem: Problem, options: SolveOptions) -> Plan | None:
    try:
        return solve(problem, options)
    except BudgetError:
        return None


def _best(problem: Problem, budget: int | None, found: list[Plan], options: SolveOptions) -> Plan | None:
    """The cheapest of ``found`` that fits, as a plan for this budget, with the largest bound that holds."""
    fitting = [plan for plan in found if plan.peak_bytes <= _room(budget)]
    if not fitting:
        return None
    # A tie goes to the budget's own plan.
    plan = min(fitting, key=lambda p: (p.cost_ns, p.budget_bytes != budget, p.peak_bytes))
    # bound(B) = max over B' >= B: more memory never costs more
    bound = max((p.bound_ns for p in found if _room(p.budget_bytes) >= _room(budget)), default=0)
    if bound > plan.cost_ns:
        raise PlanError(
            f"one search proved that no plan under {_words(budget)} costs less than {bound} ns, and "
            f"another found one of {plan.cost_ns} ns: one of them is wrong; please report it"
        )
    notes = plan.notes
    if plan.budget_bytes != budget:
        notes += (f"found under {_words(plan.budget_bytes)}: cheaper than what the search found here",)
    best = replace(plan, budget_bytes=budget, bound_ns=bound, notes=notes)
    kept = "feasible" if plan.status == "optimal" else plan.status
    best = replace(best, status="optimal" if best.gap <= options.gap else kept)
    validate(problem.with_budget(budget), best)
    return best
