"""Several graphs in one step, one budget: which plan each of them gets.

A step runs the forward passes of its calls 1 to n one after the other, and their backward passes in the
opposite order. While call t runs, what the calls before it keep for their backward passes is there, and,
in its backward pass, the gradients that those after it have left. With one plan for each graph, however
often it is called, and the least time in all, that is a small MILP:

    sum of kept[i], i < t  +  peak[t]  +  sum of left[i], i > t  -  less[t]  <=  budget    for each t

for each kind of step (a GAN has two); ``less`` is what the sum counts and is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate
from rematc.solve.model import Model, Term


class Turn(NamedTuple):
    """One call of a step: of which graph, and how much less is there than the sum says."""

    graph: int
    less_bytes: int = 0


Steps = Sequence[Sequence[Turn]]


@dataclass(frozen=True, slots=True)
class Use:
    """What a graph under one plan takes, in bytes above what is resident.

    ``peak_bytes`` while it runs, ``forward_bytes`` while it runs forward, ``kept_bytes`` from its forward
    pass to its backward pass, and ``left_bytes``, gradients, from there on.
    """

    cost_ns: int
    peak_bytes: int
    kept_bytes: int
    left_bytes: int
    forward_bytes: int = 0


def use_of(problem: Problem, plan: Plan) -> Use:
    """The use of ``problem``'s graph under ``plan``."""
    graph = problem.graph
    return Use(
        cost_ns=plan.cost_ns,
        peak_bytes=plan.peak_bytes - problem.resident_bytes,
        kept_bytes=_bytes(graph, (*graph.outputs, *plan.saved)),
        left_bytes=_bytes(graph, graph.gradients),
        forward_bytes=simulate(problem, plan).forward_bytes - problem.resident_bytes,
    )


def beside(steps: Steps, uses: Sequence[Use], graph: int) -> int:
    """The most that other calls hold while a call of ``graph`` runs; ``uses`` has one for each graph.

    >>> beside([[Turn(0), Turn(1), Turn(0, 2)]], [Use(0, 9, 4, 2), Use(0, 9, 5, 3)], 0)
    7
    """
    return max(
        sum(uses[g].kept_bytes for g, _ in turns[:t])
        + sum(uses[g].left_bytes for g, _ in turns[t + 1 :])
        - turn.less_bytes
        for turns in steps
        for t, turn in enumerate(turns)
        if turn.graph == graph
    )


def needed(steps: Steps, uses: Sequence[Use]) -> int:
    """The most that is alive in any of the steps, above what is resident."""
    called = {g for turns in steps for g, _ in turns}
    return max(uses[g].peak_bytes + beside(steps, uses, g) for g in called)


def share(steps: Steps, uses: Sequence[Sequence[Use]], budget_bytes: int) -> tuple[int, ...] | None:
    """The position in ``uses[g]`` of the plan for each graph g; None if no choice keeps the budget.

    ``steps`` has, for each kind of step, its calls in the order of their forward passes; ``budget_bytes`` is
    what is left above what is resident.

    >>> lavish, frugal, twice = Use(0, 12, 8, 1), Use(5, 9, 2, 1), [[Turn(0), Turn(0)]]
    >>> share(twice, [[lavish, frugal]], 20), share(twice, [[lavish, frugal]], 19)
    ((0,), (1,))
    """
    model, chosen = _formulated(steps, uses)
    unit = float(max(budget_bytes, 1))
    for row, less_bytes in _rows(steps, uses, chosen):
        model.row([(x, size / unit) for x, size in row], (budget_bytes + less_bytes) / unit)
    while (values := model.solve(gap=0.0).values) is not None:
        choice = _read(chosen, values)
        if needed(steps, [options[o] for options, o in zip(uses, choice, strict=True)]) <= budget_bytes:
            return choice
        # The solver's numbers are rounded, the budget is not: any choice but this one.
        model.row([(xs[o], 1.0) for xs, o in zip(chosen, choice, strict=True)], len(choice) - 1.0)
    return None


def smallest(steps: Steps, uses: Sequence[Sequence[Use]]) -> tuple[int, ...]:
    """The choice that `share` makes at the smallest budget for which it has one.

    >>> smallest([[Turn(0), Turn(0)]], [[Use(0, 12, 8, 1), Use(5, 9, 2, 1)]])
    (1,)
    """
    model, chosen = _formulated(steps, uses, with_cost=False)
    rows = _rows(steps, uses, chosen)
    most = max((less_bytes for _, less_bytes in rows), default=0)
    unit = float(most + sum(size for row, _ in rows for _, size in row) or 1)
    peak = model.variable(cost=1.0, integer=False)  # in units, and ``most`` above the real one: never below 0
    for row, less_bytes in rows:
        model.row([*((x, size / unit) for x, size in row), (peak, -1.0)], (less_bytes - most) / unit)
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
        weight = sum(turn.graph == g for turns in steps for turn in turns) / longest if with_cost else 0.0
        chosen.append([model.variable(cost=weight * u.cost_ns) for u in options])
        model.row([(x, 1.0) for x in chosen[-1]], 1.0)
        model.row([(x, -1.0) for x in chosen[-1]], -1.0)
    return model, chosen


def _rows(
    steps: Steps, uses: Sequence[Sequence[Use]], chosen: list[list[int]]
) -> list[tuple[list[Term], int]]:
    """The bytes that each choice adds while each call runs, and what is to be taken off."""
    rows = []
    for turns in steps:
        called = [turn.graph for turn in turns]
        for t, turn in enumerate(turns):
            kept, left = Counter(called[:t]), Counter(called[t + 1 :])
            row = [
                (
                    x,
                    float(
                        kept[g] * use.kept_bytes
                        + left[g] * use.left_bytes
                        + (g == turn.graph) * use.peak_bytes
                    ),
                )
                for g, options in enumerate(uses)
                for x, use in zip(chosen[g], options, strict=True)
            ]
            rows.append((row, turn.less_bytes))
    return rows


def _read(chosen: list[list[int]], values: Sequence[float]) -> tuple[int, ...]:
    return tuple(max(range(len(xs)), key=lambda o, xs=xs: values[xs[o]]) for xs in chosen)  # type: ignore[misc]


def _bytes(graph: Graph, values: tuple[int, ...]) -> int:
    storages = {graph.values[v].storage for v in values} - graph.resident
    return sum(graph.storage_bytes[s] for s in storages)
