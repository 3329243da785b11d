"""Several graphs in one step, one budget: which plan each of them gets.

A step runs the forward passes of its calls one after the other, and then their backward passes, most often
in the opposite order. While call t runs, what calls keep that ran forward and have not gone back is there,
and the gradients of those that have. With one plan for each graph, however often it is called, and the least
time in all, that is a small MILP:

    sum of kept[i], i to go back after t  +  peak[t]  +  sum of left[i], i before t  -  less[t]  <=  budget

for each call t of each kind of step (a GAN has two); ``less`` is what the sum counts and is not there. In
the opposite order that holds in the forward pass of t too. In any other, forward passes have their own rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate
from rematc.solve.model import Model, Term

FOLLOWED_BYTES = 1024  # a result of less, as a loss that is logged, is not followed once its call is through


class Turn(NamedTuple):
    """A call of a step while it runs: of which graph, beside which others, and how much less is there.

    ``kept`` and ``left`` have the graphs of the calls that are to go back after it, and that have done so
    before. ``is_forward``: it stands for the forward pass alone, else for both.
    """

    graph: int
    kept: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    less_bytes: int = 0
    is_forward: bool = False

    def beside_bytes(self, uses: Sequence[Use]) -> int:
        """What the others hold; ``uses`` has one for each graph."""
        kept, left = sum(uses[g].kept_bytes for g in self.kept), sum(uses[g].left_bytes for g in self.left)
        return kept + left - self.less_bytes

    def own_bytes(self, use: Use) -> int:
        """What it takes itself."""
        return use.forward_bytes if self.is_forward else use.peak_bytes


Steps = Sequence[Sequence[Turn]]


@dataclass(frozen=True, slots=True)
class Use:
    """What a graph under one plan takes, in bytes above what is resident.

    ``peak_bytes`` while it runs, ``forward_bytes`` while it runs forward, ``kept_bytes`` from its forward
    pass to its backward pass, and ``left_bytes``, gradients and results that nobody follows, from there on.
    """

    cost_ns: int
    peak_bytes: int
    kept_bytes: int
    left_bytes: int
    forward_bytes: int = 0


def turns(
    forward: Sequence[int],
    backward: Sequence[int],
    less_bytes: int = 0,
    twice_bytes: Sequence[int] = (),
    *,
    carried: int = 0,
) -> list[Turn]:
    """The turns of a step that runs calls of these graphs forward, and back, in these orders.

    There is ``less_bytes`` in all of it, and ``twice_bytes`` while each goes back. The first ``carried`` ran
    forward before.

    >>> [(turn.graph, turn.kept, turn.left) for turn in turns([0, 1], [1, 0])]
    [(1, (0,), ()), (0, (), (1,))]
    """
    twice = twice_bytes or [0] * len(backward)
    both = [
        Turn(graph, tuple(backward[t + 1 :]), tuple(backward[:t]), less_bytes + twice[t])
        for t, graph in enumerate(backward)
    ]
    if list(backward) == list(reversed(forward)):
        return both
    own = range(carried, len(forward))
    return [*both, *(Turn(forward[t], tuple(forward[:t]), (), less_bytes, is_forward=True) for t in own)]


class Footprint(NamedTuple):
    """What the code of a plan takes, as in `Use`: it may keep more than the plan saves, as inputs that it has
    copied to another layout.
    """

    peak_bytes: int
    forward_bytes: int
    kept_bytes: int


def use_of(problem: Problem, plan: Plan) -> Use:
    """The use of ``problem``'s graph under ``plan``."""
    graph = problem.graph
    return Use(
        cost_ns=plan.cost_ns,
        peak_bytes=plan.peak_bytes - problem.resident_bytes,
        kept_bytes=_bytes(graph, (*graph.outputs, *plan.saved)),
        left_bytes=_bytes(graph, (*graph.gradients, *_not_followed(graph))),
        forward_bytes=simulate(problem, plan).forward_bytes - problem.resident_bytes,
    )


def beside(steps: Steps, uses: Sequence[Use], graph: int) -> int:
    """What others hold while a call of ``graph`` runs, where its own peak on top of that is the most.

    >>> beside([[Turn(0, (1, 0)), Turn(0, (0,), (1,), less_bytes=2)]], [Use(0, 9, 4, 2), Use(0, 9, 5, 3)], 0)
    9
    """
    return max(
        turn.beside_bytes(uses) + turn.own_bytes(uses[graph]) - uses[graph].peak_bytes
        for turn in itertools.chain.from_iterable(steps)
        if turn.graph == graph
    )


def needed(steps: Steps, uses: Sequence[Use]) -> int:
    """The most that is alive in any of the steps, above what is resident."""
    turns = itertools.chain.from_iterable(steps)
    return max(turn.beside_bytes(uses) + turn.own_bytes(uses[turn.graph]) for turn in turns)


def share(steps: Steps, uses: Sequence[Sequence[Use]], budget_bytes: int) -> tuple[int, ...] | None:
    """The position in ``uses[g]`` of the plan for each graph g; None if no choice keeps the budget.

    ``steps`` has the calls of each kind of step; ``budget_bytes`` is what is left above what is resident.

    >>> lavish, frugal, twice = Use(0, 12, 8, 1), Use(5, 9, 2, 1), [turns([0, 0], [0, 0])]
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

    >>> smallest([turns([0, 0], [0, 0])], [[Use(0, 12, 8, 1), Use(5, 9, 2, 1)]])
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
        calls = sum(turn.graph == g and not turn.is_forward for turns in steps for turn in turns)
        weight = calls / longest if with_cost else 0.0
        chosen.append([model.variable(cost=weight * u.cost_ns) for u in options])
        model.row([(x, 1.0) for x in chosen[-1]], 1.0)
        model.row([(x, -1.0) for x in chosen[-1]], -1.0)
    return model, chosen


def _rows(
    steps: Steps, uses: Sequence[Sequence[Use]], chosen: list[list[int]]
) -> list[tuple[list[Term], int]]:
    """The bytes that each choice adds while each call runs, and what is to be taken off."""
    rows = []
    for turn in itertools.chain.from_iterable(steps):
        kept, left = Counter(turn.kept), Counter(turn.left)
        row: list[Term] = []
        for g, options in enumerate(uses):
            for x, use in zip(chosen[g], options, strict=True):
                others = kept[g] * use.kept_bytes + left[g] * use.left_bytes
                row.append((x, float(others + (turn.own_bytes(use) if g == turn.graph else 0))))
        rows.append((row, turn.less_bytes))
    return rows


def _read(chosen: list[list[int]], values: Sequence[float]) -> tuple[int, ...]:
    return tuple(max(range(len(xs)), key=lambda o, xs=xs: values[xs[o]]) for xs in chosen)  # type: ignore[misc]


def _not_followed(graph: Graph) -> Iterator[int]:
    """Results so small that it is not looked whether somebody has them still."""
    return (v for v in graph.outputs if graph.storage_bytes[graph.values[v].storage] < FOLLOWED_BYTES)


def _bytes(graph: Graph, values: tuple[int, ...]) -> int:
    storages = {graph.values[v].storage for v in values} - graph.resident
    return sum(graph.storage_bytes[s] for s in storages)
