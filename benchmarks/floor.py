"""The smallest budget that the solver accepts, and what it proves about smaller ones."""

from __future__ import annotations

from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.solve import solve


def floor_bytes(problem: Problem, options: SolveOptions) -> tuple[int, int]:
    """Above what is resident: the smallest budget that is accepted, and a bound that no plan goes below.

    Both as the solver says when it refuses a budget. The bound is for the order of the backward ops that
    it chose.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> floor_bytes(Problem(g, (OpCost(5),) * 3), SolveOptions())
    (28, 28)
    """
    try:
        solve(problem.with_budget(1), options)
    except BudgetError as e:
        return e.minimum_bytes - problem.resident_bytes, e.bound_bytes - problem.resident_bytes
    return 0, 0
