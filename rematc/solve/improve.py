"""Make a feasible plan cheaper: free the decisions about some neighbouring units, solve, and go on.

Large neighbourhood search (Shaw 1998): everything else stays as it is, so each MILP is small and has
a solution from the start. Neighbourhoods are runs of consecutive units, swept from end to end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve.formulate import Formulation
from rematc.solve.greedy import Draft
from rematc.solve.merge import Merged
from rematc.solve.milp import add_broken, plan_of, run

FREE = 3000  # binary variables that a neighbourhood has at the least
SLICE_S = 4.0

Values = dict[mathopt.Variable, float]


@dataclass(frozen=True, slots=True)
class Start:
    """A plan within the budget, and the values of the variables that say it."""

    plan: Plan
    values: Mapping[mathopt.Variable, float]


def values_of(f: Formulation, draft: Draft) -> Values:
    """The variables that say what ``draft`` does."""
    core = f.core
    runs = [set(units) for units in draft.runs]
    values = {x: float(u in runs[t]) for (u, t), x in f.again.items()}
    for t in reversed(range(len(core.stages))):
        for b in range(len(core.block_bytes)):
            x = f.kept.get((b, t))
            if x is None or x in values:
                continue
            used = b in core.stages[t].reads or any(w in runs[t] for w in core.readers[b])
            later = f.kept.get((b, t + 1))
            past = later is not None and values[later] > 0.5
            values[x] = float((used or past) and core.maker[b] not in runs[t])
    for u in reversed(range(len(core.units))):
        if u in f.early:
            kept = any(values.get(f.kept[b, 0], 0.0) for b in core.units[u].makes if (b, 0) in f.kept)
            read = any(
                values.get(f.early[w], 0.0)
                for b in core.units[u].makes
                for w in core.readers[b]
                if w in f.early
            )
            values[f.early[u]] = float(kept or read)
    return values


def improve(
    problem: Problem,
    merged: Merged,
    f: Formulation,
    start: Start,
    goal_ns: float,
    gap: float,
    deadline: float,
) -> Plan:
    """The cheapest plan found by ``deadline``; stops early at one that costs ``goal_ns`` at most.

    It stops as well once everything is free and solved within ``gap``: ``f`` has nothing cheaper.
    """
    best = start
    assert problem.budget_bytes is not None
    for free in _neighbourhoods(f):
        left = deadline - time.monotonic()
        if left <= 0.3 or best.plan.cost_ns <= goal_ns:
            break
        _fix(f, best.values, free)
        result = run(f, min(left, SLICE_S), gap)
        if not result.has_primal_feasible_solution():
            continue
        values = result.variable_values()
        plan = plan_of(problem, merged, f, values)
        if plan.peak_bytes > problem.budget_bytes:
            add_broken(problem, merged, f, plan)
            continue
        if plan.cost_ns < best.plan.cost_ns:
            best = Start(plan, values)
        is_all = len(free) == len(f.core.units)
        if is_all and result.termination.reason is mathopt.TerminationReason.OPTIMAL:
            break
    return best.plan


def _neighbourhoods(f: Formulation) -> Iterator[frozenset[int]]:
    """Runs of consecutive units, last first and overlapping by half; each sweep's are half as large again."""
    weight = [0] * len(f.core.units)
    for u, _ in f.again:
        weight[u] += 2  # R and, about as many, S
    size = FREE
    while True:
        runs = _runs(weight, size)
        yield from reversed(runs)
        size = size * 3 // 2


def _runs(weight: list[int], size: int) -> list[frozenset[int]]:
    """Overlapping ranges that cover all units, each with a weight of at least ``size`` (or all there is).

    >>> [sorted(r) for r in _runs([1, 1, 1, 1, 1, 1], 4)]
    [[0, 1, 2, 3], [2, 3, 4, 5]]
    """
    total, first, found = 0, 0, []
    for u, w in enumerate(weight):
        total += w
        if total >= size:
            found.append(frozenset(range(first, u + 1)))
            first = (first + u + 1) // 2
            total = sum(weight[first : u + 1])
    covered = max((max(r) for r in found), default=-1)
    if covered < len(weight) - 1:
        found.append(frozenset(range(first, len(weight))))
    return found


def _fix(f: Formulation, values: Mapping[mathopt.Variable, float], free: frozenset[int]) -> None:
    """Hold every binary variable at its value, but for those of the units ``free``."""
    owned = [(u, x) for (u, _), x in f.again.items()] + list(f.early.items())
    owned += [(f.core.maker[b], x) for (b, _), x in f.kept.items()]
    for u, x in owned:
        held = u not in free
        x.lower_bound = round(values[x]) if held else 0.0
        x.upper_bound = round(values[x]) if held else 1.0
