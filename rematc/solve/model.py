"""A mixed-integer program as plain arrays, and one call to OR-Tools. All variables lie between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

Term = tuple[int, float]  # a variable and its coefficient
Reason = mathopt.TerminationReason


@dataclass(frozen=True, slots=True)
class Result:
    """``values`` of the best solution found, if any; no solution's objective is below ``bound``.

    ``finished``: not stopped by a limit. Without values the program is then infeasible.
    """

    values: Sequence[float] | None
    bound: float
    finished: bool


@dataclass
class Model:
    """Minimise ``offset`` and the cost of the variables under rows: sum of coefficient * variable <= upper.

    >>> m = Model()
    >>> x, y = m.variable(cost=2.0), m.variable(cost=1.0)
    >>> m.row([(x, -1.0), (y, -1.0)], -1.0)
    >>> m.solve(gap=0.0)
    Result(values=[0.0, 1.0], bound=1.0, finished=True)
    """

    offset: float = 0.0
    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    column_of: list[int] = field(default_factory=list)
    coefficient: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, integer: bool = True) -> int:
        """A new variable: 0 or 1, or anything between if it is not ``integer``."""
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Iterable[Term], upper: float) -> None:
        """Sum of the terms <= ``upper``."""
        total: dict[int, float] = {}
        for x, c in terms:
            total[x] = total.get(x, 0.0) + c
        for x, c in sorted(total.items()):
            self.row_of.append(len(self.upper))
            self.column_of.append(x)
            self.coefficient.append(c)
        self.upper.append(upper)

    def solve(
        self,
        *,
        gap: float,
        time_limit_s: float | None = None,
        node_limit: int | None = None,
        fixed: Mapping[int, float] | None = None,
    ) -> Result:
        """Solve with HiGHS until solution and bound are within ``gap``; ``fixed`` variables don't move."""
        limit = None if time_limit_s is None else timedelta(seconds=max(time_limit_s, 0.01))
        parameters = mathopt.SolveParameters(
            relative_gap_tolerance=gap, node_limit=node_limit, time_limit=limit, random_seed=1
        )
        result = mathopt.solve(self._program(fixed or {}), mathopt.SolverType.HIGHS, params=parameters)
        reason = result.termination.reason
        values = None
        if result.has_primal_feasible_solution():
            values = [0.0] * len(self.cost)
            for x, value in result.variable_values().items():
                values[x.id] = value
        infeasible = reason in (Reason.INFEASIBLE, Reason.INFEASIBLE_OR_UNBOUNDED)
        bound = result.termination.objective_bounds.dual_bound
        return Result(values, bound, infeasible or reason is Reason.OPTIMAL)

    def _program(self, fixed: Mapping[int, float]) -> mathopt.Model:
        n = range(len(self.cost))
        rows = range(len(self.upper))
        priced = [x for x in n if self.cost[x]]
        return mathopt.Model.from_model_proto(
            model_pb2.ModelProto(
                variables=model_pb2.VariablesProto(
                    ids=n,
                    lower_bounds=[fixed.get(x, 0.0) for x in n],
                    upper_bounds=[fixed.get(x, 1.0) for x in n],
                    integers=self.integer,
                ),
                objective=_objective(self.offset, priced, [self.cost[x] for x in priced]),
                linear_constraints=model_pb2.LinearConstraintsProto(
                    ids=rows, lower_bounds=[-math.inf for _ in rows], upper_bounds=self.upper
                ),
                linear_constraint_matrix=_matrix(self.row_of, self.column_of, self.coefficient),
            )
        )


def _objective(offset: float, ids: Sequence[int], values: Sequence[float]) -> model_pb2.ObjectiveProto:
    objective = model_pb2.ObjectiveProto(offset=offset)
    objective.linear_coefficients.ids.extend(ids)
    objective.linear_coefficients.values.extend(values)
    return objective


def _matrix(rows: Sequence[int], columns: Sequence[int], coefficients: Sequence[float]):  # type: ignore
    matrix = model_pb2.ModelProto().linear_constraint_matrix
    matrix.row_ids.extend(rows)
    matrix.column_ids.extend(columns)
    matrix.coefficients.extend(coefficients)
    return matrix
