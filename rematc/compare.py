"""Every strategy at every budget, side by side: what it needs, what it costs, how far from the best."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from rematc.baselines import STRATEGIES, Strategy
from rematc.errors import BudgetError, OptionError, PlanError, format_bytes
from rematc.options import Budget, SolveOptions, parse_budget
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import validate

OWN = "rematc"
HEAD = ("budget", "strategy", "peak", "fits", "recompute", "of forward", "bound", "gap", "status", "solve")


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy at one budget.

    ``peak_bytes`` and ``cost_ns`` are None where there is no plan: ``status`` is "infeasible" then, and
    ``minimum_bytes`` the smallest budget that is accepted. ``cost_share`` is the cost over the time of the
    forward pass, None if that takes none. ``bound_ns`` is what any plan under this budget costs at least, the
    best that a strategy proved; ``gap`` is (cost - bound) / bound. Both are None where nothing is
    proven, ``gap`` also where the plan does not fit: the bound does not hold for it.
    """

    strategy: str
    budget_bytes: int | None
    fits: bool
    status: str
    solve_s: float
    peak_bytes: int | None = None
    cost_ns: int | None = None
    cost_share: float | None = None
    bound_ns: int | None = None
    gap: float | None = None
    minimum_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows, by budget in the order given and then by strategy; ``str()`` is a table of them.

    >>> print(Comparison((Row("save_all", 16, False, "baseline", 0.5, 28, 0, 0.0),)))
    budget    strategy    peak    fits    recompute    of forward    bound    gap    status    solve
    --------  ----------  ------  ------  -----------  ------------  -------  -----  --------  -------
    16 B      save_all    28 B    no      0.000 ms     0.0 %         -        -      baseline  0.50 s
    """

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        cells = [_cells(row) for row in self.rows]
        return tabulate(cells, headers=HEAD, disable_numparse=True)


def compare(
    problem: Problem,
    budgets: Iterable[Budget],
    strategies: Sequence[str | Strategy] | None = None,
    options: SolveOptions | None = None,
) -> Comparison:
    """Plan ``problem`` by each strategy at each budget; every plan is validated.

    ``budgets`` as for `rematc.options.parse_budget`: bytes, "20GB", None for no limit. ``strategies`` are
    names of `rematc.baselines.STRATEGIES`, "rematc" for the solver, or functions of the same signature; by
    default all of them. Raises `OptionError` for an unknown name or budget, and `PlanError` if a plan is not
    valid, or refutes what another strategy claims: costs less than its lower bound, or needs less memory
    than it calls the minimum.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> c = compare(Problem(g, (OpCost(5),) * 3), ["1kB", 20], ["save_all", "recompute_all"])
    >>> [(row.strategy, row.peak_bytes, row.fits, row.cost_share) for row in c.rows[:2]]
    [('save_all', 28, True, 0.0), ('recompute_all', 28, True, 0.5)]
    """
    chosen = [_named(s) for s in ([*STRATEGIES, OWN] if strategies is None else strategies)]
    rows: list[Row] = []
    for budget in [parse_budget(b) for b in budgets]:
        asked = problem.with_budget(budget)
        rows += _bounded([_row(asked, name, f, options or SolveOptions()) for name, f in chosen])
    return Comparison(tuple(rows))


def _named(strategy: str | Strategy) -> tuple[str, Strategy]:
    if not isinstance(strategy, str):
        return getattr(strategy, "__name__", repr(strategy)), strategy
    if strategy == OWN:
        from rematc.solve import solve  # loads OR-Tools: only when asked for

        return OWN, solve
    if strategy not in STRATEGIES:
        known = ", ".join([*STRATEGIES, OWN])
        raise OptionError(f"unknown strategy {strategy!r}: give one of {known}, or a function of yours")
    return strategy, STRATEGIES[strategy]


def _row(problem: Problem, name: str, strategy: Strategy, options: SolveOptions) -> Row:
    started, budget = time.perf_counter(), problem.budget_bytes
    try:
        plan = strategy(problem, options)
    except BudgetError as e:
        seconds = time.perf_counter() - started
        return Row(name, budget, False, "infeasible", seconds, minimum_bytes=e.minimum_bytes)
    seconds = plan.solve_s or time.perf_counter() - started
    profile = validate(problem.with_budget(None), plan)
    return Row(
        strategy=name,
        budget_bytes=budget,
        fits=budget is None or profile.peak_bytes <= budget,
        status=plan.status,
        solve_s=seconds,
        peak_bytes=profile.peak_bytes,
        cost_ns=profile.recompute_ns,
        cost_share=_share(problem, plan),
        bound_ns=None if plan.status == "baseline" else plan.bound_ns,
    )


def _share(problem: Problem, plan: Plan) -> float | None:
    forward_ns = problem.forward_ns
    return plan.cost_ns / forward_ns if forward_ns else None


def _bounded(rows: list[Row]) -> list[Row]:
    """The rows of one budget, each with the best bound that one of them proved, and its gap to it."""
    _check_claims(rows)
    bound = max((row.bound_ns for row in rows if row.bound_ns is not None), default=None)
    return [
        replace(row, bound_ns=bound, gap=None if bound is None else _gap(row.cost_ns, bound))
        if row.fits
        else replace(row, bound_ns=bound)
        for row in rows
    ]


def _gap(cost_ns: int | None, bound_ns: int) -> float | None:
    if cost_ns is None or cost_ns == bound_ns:
        return None if cost_ns is None else 0.0
    return (cost_ns - bound_ns) / bound_ns if bound_ns else float("inf")


def _check_claims(rows: list[Row]) -> None:
    for claim in rows:
        for row in rows:
            if claim.bound_ns is not None and row.fits and (row.cost_ns or 0) < claim.bound_ns:
                _refuted(claim, f"no plan costs less than {claim.bound_ns} ns", f"costs {row.cost_ns}", row)
            low = claim.minimum_bytes
            if low is not None and row.peak_bytes is not None and row.peak_bytes < low:
                _refuted(claim, f"no plan needs less than {low} bytes", f"needs {row.peak_bytes}", row)


def _refuted(claim: Row, claimed: str, found: str, row: Row) -> None:
    raise PlanError(
        f"at a budget of {row.budget_bytes} bytes {claim.strategy} says that {claimed}, and {row.strategy} "
        f"{found}: one of them is wrong; please report it"
    )


def _cells(row: Row) -> tuple[str, ...]:
    minimum = "" if row.minimum_bytes is None else f": needs {row.minimum_bytes} B"
    return (
        "no limit" if row.budget_bytes is None else format_bytes(row.budget_bytes),
        row.strategy,
        "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "yes" if row.fits else "no",
        _milliseconds(row.cost_ns),
        _percent(row.cost_share),
        _milliseconds(row.bound_ns),
        _percent(row.gap),
        row.status + minimum,
        f"{row.solve_s:.2f} s",
    )


def _milliseconds(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else "inf" if share == float("inf") else f"{share:.1%}".replace("%", " %")
