"""Several graphs in one step, one budget: which plan each of them gets.

A step runs the forward passes of its calls 1 to n one after the other, and their backward passes in the
opposite order. While call t runs, what the calls before it keep for their backward passes is there, and,
in its backward pass, the gradients that those after it have left. With one plan for each graph, however
often it is called, and the least time in all, that is a small MILP:

    sum of kept[i], i < t  +  peak[t]  +  sum of left[i], i > t  <=  budget    for each t

for each kind of step (a GAN has two).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve.model import Model, Term

Steps = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Use:
    """What a graph under one plan takes, in bytes above what is resident.

    ``peak_bytes`` while it runs, ``kept_bytes`` from its forward pass to its backward pass, and
    ``left_bytes``, gradients, from there on.
    """

    cost_ns: int
    peak_bytes: int
    kept_bytes: int
    left_bytes: int


def use_of(problem: Problem, plan: Plan) -> Use:
    """The use of ``problem``'s graph under ``plan``."""
    graph = problem.graph
    return Use(
        cost_ns=plan.cost_ns,
        peak_bytes=plan.peak_bytes - problem.resident_bytes,
        kept_bytes=_bytes(graph, (*graph.outputs, *plan.saved)),
        left_bytes=_bytes(graph, graph.gradients),
    )


def beside(steps: Steps, uses: Sequence[Use], graph: int) -> int:
    """The most that other calls hold while a call of ``graph`` runs; ``uses`` has one for each graph.

    >>> beside([[0, 1, 0]], [Use(0, 9, 4, 2), Use(0, 9, 5, 3)], 0)
    9
    """
    return max(
        sum(uses[g].kept_bytes for g in calls[:t]) + sum(uses[g].left_bytes for g in calls[t + 1 :])
        for calls in steps
        for t, called in enumerate(calls)
        if called == graph
    )


def needed(steps: Steps, uses: Sequence[Use]) -> int:
    """The most that is alive in any of the steps, above what is resident."""
    called = {g for calls in steps for g in calls}
    return max(uses[g].peak_bytes + beside(steps, uses, g) for g in called)


def share(steps: Steps, uses: Sequence[Sequence[Use]], budget_bytes: int) -> tuple[int, ...] | None:
    """The position in ``uses[g]`` of the plan for each graph g; None if no choice keeps the budget.

    ``steps`` has, for each kind of step, the graphs in the order of their forward passes; ``budget_bytes`` is
    what is left above what is resident.

    >>> lavish, frugal = Use(0, 12, 8, 1), Use(5, 9, 2, 1)
    >>> share([[0, 0]], [[lavish, frugal]], 20), share([[0, 0]], [[lavish, frugal]], 19)
    ((0,), (1,))
    """
    model, chosen = _formulated(steps, uses)
    unit = float(max(budget_bytes, 1))
    for row in _rows(steps, uses, chosen):
        model.row([(x, size / unit) for x, size in row], budget_bytes / unit)
    while (values := model.solve(gap=0.0).values) is not None:
        choice = _read(chosen, values)
        if needed(steps, [options[o] for options, o in zip(uses, choice, strict=True)]) <= budget_bytes:
            return choice
        # The solver's numbers are rounded, the budget is not: any choice but this one.
        model.row([(xs[o], 1.0) for xs, o in zip(chosen, choice, strict=True)], len(choice) - 1.0)
    return None


def smallest(steps: Steps, uses: Sequence[Sequence[Use]]) -> tuple[int, ...]:
    """The choice that `share` makes at the smallest budget for which it has one.

    >>> smallest([[0, 0]], [[Use(0, 12, 8, 1), Use(5, 9, 2, 1)]])
    (1,)
    """
    model, chosen = _formulated(steps, uses, with_cost=False)
    rows = _rows(steps, uses, chosen)
    unit = float(sum(size for row in rows for _, size in row) or 1)
    peak = model.variable(cost=1.0, integer=False)
    for row in rows:
        model.row([*((x, size / unit) for x, size in row), (peak, -1.0)], 0.0)
    values = model.solve(gap=0.0).values
    assert values is not None
    return _read(chosen, values)


def _formulated(
    steps: Steps, uses: Sequence[Sequence[Use]], *, with_cost: bool = True
) -> tuple[Model, list[list[int]]]:
    """A variable for each graph and plan; one plan for each graph."""
    model, chosen = Model(), list[list[int]]()
    longest = float(max(1, *(u.cost_ns for options in uses for u in options)))
    for g, options in enumerate(uses):
        weight = sum(calls.count(g) for calls in steps) / longest if with_cost else 0.0
        chosen.append([model.variable(cost=weight * u.cost_ns) for u in options])
        model.row([(x, 1.0) for x in chosen[-1]], 1.0)
        model.row([(x, -1.0) for x in chosen[-1]], -1.0)
    return model, chosen


def _rows(steps: Steps, uses: Sequence[Sequence[Use]], chosen: list[list[int]]) -> list[list[Term]]:
    """The bytes that each choice adds, while each call runs."""
    rows = []
    for calls in steps:
        for t, called in enumerate(calls):
            kept, left = Counter(calls[:t]), Counter(calls[t + 1 :])
            rows.append(
                [
                    (
                        x,
                        float(
                            kept[g] * use.kept_bytes
                            + left[g] * use.left_bytes
                            + (g == called) * use.peak_bytes
                        ),
                    )
                    for g, options in enumerate(uses)
                    for x, use in zip(chosen[g], options, strict=True)
                ]
            )
    return rows


def _read(chosen: list[list[int]], values: Sequence[float]) -> tuple[int, ...]:
    return tuple(max(range(len(xs)), key=lambda o, xs=xs: values[xs[o]]) for xs in chosen)  # type: ignore[misc]


def _bytes(graph: Graph, values: tuple[int, ...]) -> int:
    storages = {graph.values[v].storage for v in values} - graph.resident
    return sum(graph.storage_bytes[s] for s in storages)
