"""A mixed-integer program as plain arrays, and one call to OR-Tools. All variables lie between 0 and 1."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from rematc.solve.clock import current, spend

Term = tuple[int, float]  # a variable and its coefficient
TOLERANCE = 1e-6
NODES = 400  # of the search tree of one program
# Seconds of work:
READ_S = 5e-6  # for each coefficient
CUTS_S, CUT_S = 0.01, 2e-7  # for each round of cuts, or node, that the log has a line of; and by coefficients
ITERATION_S = 1.7e-6  # for each iteration of HiGHS, times the root of the number of coefficients
LEAST_S, ROOT_S, NODE_S = 1.5e-5, 4e-5, 1.5e-6  # before the first branch at least, and often; each node
BRIEF_S = 0.5  # for less, it is not worth to look at the clock
SLOW = 8.0  # times what is expected: on the machine counted by, most MILPs take up to 2, two took 4, one 12
LARGE = 50_000  # coefficients: to try out where to branch takes longer than to branch
ITERATIONS = re.compile(r"% .* (\d+)([km]?) +\d+\.\d+s$")  # up to now, at the end of a line of the log
SCALE = {"": 1, "k": 10**3, "m": 10**6}
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
    is_presolved: bool = True  # by the solver, where all is to be decided

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

    @property
    def n_rows(self) -> int:
        """How many rows there are by now."""
        return len(self.upper)

    def truncate(self, n_rows: int) -> None:
        """Leave the first ``n_rows`` rows alone."""
        n_terms = bisect_left(self.row_of, n_rows)
        del self.upper[n_rows:], self.row_of[n_terms:], self.column_of[n_terms:], self.coefficient[n_terms:]

    def objective(self, values: Sequence[float]) -> float:
        """What ``values`` cost."""
        return self.offset + sum(c * values[x] for x, c in enumerate(self.cost) if c)

    def relaxed(self) -> Model:
        """The same, but all variables may be anything between 0 and 1."""
        return replace(self, integer=[False] * len(self.integer))

    def solve(
        self,
        *,
        gap: float,
        time_limit_s: float | None = None,
        node_limit: int | None = None,
        fixed: Mapping[int, float] | None = None,
        hint: Mapping[int, float] | None = None,
    ) -> Result:
        """Solve with HiGHS until solution and bound are within ``gap``.

        ``fixed`` variables don't move; ``hint`` is a solution, or a part of one, to begin with.
        ``time_limit_s`` are seconds of work. They limit the search tree, not what is done before it: a
        program that would take longer for that is not begun. If in real time it takes `SLOW` times as long as
        was expected, it ends, and nothing is known, or that would depend on when it did.
        """
        proto = self._program(fixed or {})
        if proto is None:
            return Result(None, math.inf, True)
        size = len(proto.linear_constraint_matrix.row_ids)
        if time_limit_s is not None and time_limit_s < LEAST_S * size:
            return Result(None, -math.inf, False)
        program = mathopt.Model.from_model_proto(proto)
        parameters = mathopt.SolveParameters(
            relative_gap_tolerance=gap,
            node_limit=_nodes(node_limit, time_limit_s, size),
            time_limit=_guard(time_limit_s, size),
            random_seed=1,
            presolve=None if fixed or self.is_presolved else mathopt.Emphasis.OFF,
            highs=_options(size),
        )
        meter, begun = _Meter(CUTS_S + CUT_S * size, ITERATION_S * math.sqrt(size)), current().done
        spend(READ_S * size)
        result = mathopt.solve(
            program,
            mathopt.SolverType.HIGHS,
            params=parameters,
            model_params=_hinted(program, hint or {}),
            msg_cb=meter.read,
        )
        meter.count(result.solve_stats.simplex_iterations)
        reason = result.termination.reason
        if result.termination.limit is mathopt.Limit.TIME:
            meter.clock.was_cut = True
            if time_limit_s is not None and meter.clock.real_left() > 0:
                spend(begun + time_limit_s - meter.clock.done)  # less than was counted, if it overran
                return Result(None, -math.inf, False)
        values = None
        if result.has_primal_feasible_solution():
            values = [0.0] * len(self.cost)
            for x, value in (fixed or {}).items():
                values[x] = value
            for x, value in result.variable_values().items():
                values[x.id] = value
        infeasible = reason in (Reason.INFEASIBLE, Reason.INFEASIBLE_OR_UNBOUNDED)
        bound = result.termination.objective_bounds.dual_bound
        return Result(values, bound, infeasible or reason is Reason.OPTIMAL)

    def _program(self, fixed: Mapping[int, float]) -> model_pb2.ModelProto | None:
        """What is left to decide; None if the ``fixed`` variables break a row by themselves."""
        value = np.full(len(self.cost), np.nan)
        value[list(fixed)] = list(fixed.values())
        free, cost = np.isnan(value), np.array(self.cost)
        row, column, coefficient = map(np.array, (self.row_of, self.column_of, self.coefficient))
        row, column = row.astype(int), column.astype(int)  # also where there are none
        open_ = free[column]
        known = np.bincount(row[~open_], coefficient[~open_] * value[column[~open_]], len(self.upper))
        upper = np.array(self.upper) - known
        most = np.bincount(row[open_], np.maximum(coefficient[open_], 0), len(self.upper))
        if ((np.bincount(row[open_], minlength=len(self.upper)) == 0) & (upper < -TOLERANCE)).any():
            return None
        can_break = most > upper
        keep = open_ & can_break[row]
        ids = np.flatnonzero(free)
        rows = np.flatnonzero(can_break & (np.bincount(row[keep], minlength=len(self.upper)) > 0))
        priced = ids[cost[ids] != 0]
        offset = self.offset + float(cost[~free] @ value[~free])
        return model_pb2.ModelProto(
            variables=model_pb2.VariablesProto(
                ids=ids,
                lower_bounds=np.zeros(len(ids)),
                upper_bounds=np.ones(len(ids)),
                integers=np.array(self.integer, dtype=bool)[ids],
            ),
            objective=_objective(offset, priced, cost[priced]),
            linear_constraints=model_pb2.LinearConstraintsProto(
                ids=rows, lower_bounds=np.full(len(rows), -math.inf), upper_bounds=upper[rows]
            ),
            linear_constraint_matrix=_matrix(row[keep], column[keep], coefficient[keep]),
        )


class _Meter:
    """Reads in the log of HiGHS how much it has done: OR-Tools passes on nothing else before the end."""

    def __init__(self, line_s: float, iteration_s: float) -> None:
        self.clock = current()  # HiGHS may write from another thread
        self.line_s, self.iteration_s, self.counted = line_s, iteration_s, 0

    def read(self, lines: Sequence[str]) -> None:
        for line in lines:
            if found := ITERATIONS.search(line):
                self.clock.spend(self.line_s)
                self.count(int(found[1]) * SCALE[found[2]])

    def count(self, iterations: int) -> None:
        """So many up to now."""
        more, self.counted = max(0, iterations - self.counted), max(self.counted, iterations)
        self.clock.spend(self.iteration_s * more)


def _nodes(limit: int | None, time_limit_s: float | None, size: int) -> int | None:
    """How many there may be in the search tree."""
    given = [] if limit is None else [limit]
    if time_limit_s is not None and math.isfinite(time_limit_s):
        given.append(1 + int(max(0.0, time_limit_s / max(1, size) - ROOT_S) / NODE_S))
    return min(given, default=None)


def _options(size: int) -> highs_pb2.HighsOptionsProto:
    """The log has a line wherever it can have one; a large program is not solved again and again in parts."""
    options = highs_pb2.HighsOptionsProto(double_options={"mip_min_logging_interval": 0.0})
    if size >= LARGE:
        options.int_options["mip_pscost_minreliable"] = 0  # no branch is tried out before it is taken
        for again in ("allow_restart", "heuristic_run_rins", "heuristic_run_root_reduced_cost"):
            options.bool_options[f"mip_{again}"] = False
    return options


def _guard(time_limit_s: float | None, size: int) -> timedelta | None:
    """Real time."""
    expected_s = math.inf if time_limit_s is None else max(BRIEF_S, time_limit_s, ROOT_S * size)
    left_s = min(current().real_left(), SLOW * expected_s)
    return timedelta(seconds=max(left_s, 0.01)) if math.isfinite(left_s) else None


def _hinted(program: mathopt.Model, hint: Mapping[int, float]) -> mathopt.ModelSolveParameters:
    values = {program.get_variable(x): v for x, v in hint.items() if program.has_variable(x)}
    return mathopt.ModelSolveParameters(
        solution_hints=[mathopt.SolutionHint(values)] if values else [],
        variable_values_filter=mathopt.VariableFilter(skip_zero_values=True),  # most are, and all is read
        dual_values_filter=mathopt.LinearConstraintFilter(filtered_items=()),
        reduced_costs_filter=mathopt.VariableFilter(filtered_items=()),
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
