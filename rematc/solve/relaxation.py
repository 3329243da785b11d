"""The linear relaxation of a `Model`, solved again and again while rows are added.

HiGHS goes on from the last solution's basis then, which takes a fraction of the time. OR-Tools' interface to
it begins each anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import highspy
import numpy as np

from rematc.solve.clock import current, spend
from rematc.solve.model import TOLERANCE, Model, Result, Term

Status = highspy.HighsModelStatus
READ_S, ITERATION_S = (
    3e-7,
    4.5e-7,
)  # of work: for each coefficient; for each iteration, by their number's root
MOST_ITERATIONS = 2**31 - 1
NONE_FIXED: Mapping[int, float] = MappingProxyType({})
NO_SOLUTION = Status.kInfeasible, Status.kUnboundedOrInfeasible


class Relaxation:
    """The variables of ``model`` may be anything between 0 and 1, but for those that are ``fixed``.

    >>> m = Model()
    >>> x, y = m.variable(cost=2.0), m.variable(cost=3.0)
    >>> m.row([(x, -2.0), (y, -2.0)], -1.0)
    >>> relaxed = Relaxation(m)
    >>> relaxed.solve(1.0)
    Result(values=[0.5, 0.0], bound=1.0, finished=True)
    >>> relaxed.add([([(y, -1.0)], -1.0)])
    >>> relaxed.solve(1.0).bound
    3.0
    """

    def __init__(self, model: Model, fixed: Mapping[int, float] = NONE_FIXED) -> None:
        self.offset, self.least_upper = model.offset, min(model.upper, default=0.0)
        self.highs = highspy.Highs()
        self.highs.silent()
        _taken(self.highs.passModel(_program(model, fixed)))

    def add(self, rows: Sequence[tuple[Sequence[Term], float]]) -> None:
        """Add rows: the terms, and what their sum is at most."""
        terms = [term for row, _ in rows for term in row]
        starts = np.cumsum([0, *(len(row) for row, _ in rows[:-1])])
        status = self.highs.addRows(
            len(rows),
            np.full(len(rows), -math.inf),
            np.array([upper for _, upper in rows]),
            len(terms),
            starts.astype(np.int32),
            np.array([x for x, _ in terms], dtype=np.int32),
            np.array([c for _, c in terms]),
        )
        _taken(status)

    def solve(self, time_limit_s: float) -> Result:
        """The solution; no values if there is none, or none by the time limit, in seconds of work."""
        size = self.highs.getNumNz()
        iteration_s = ITERATION_S * math.sqrt(size + 1)
        most = int(min(MOST_ITERATIONS, max(1.0, time_limit_s / iteration_s)))
        self.highs.setOptionValue("simplex_iteration_limit", most)
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + max(current().real_left(), 0.01))
        self.highs.run()
        spend(READ_S * size + iteration_s * max(0, self.highs.getInfo().simplex_iteration_count))
        status = self.highs.getModelStatus()
        if status == Status.kModelEmpty:  # there may be rows, which nothing can mend
            is_possible = self.least_upper >= -TOLERANCE
            return Result([], self.offset, True) if is_possible else Result(None, math.inf, True)
        if status != Status.kOptimal:
            is_infeasible = status in NO_SOLUTION
            return Result(None, math.inf if is_infeasible else -math.inf, is_infeasible)
        bound = self.highs.getInfo().objective_function_value
        return Result(list(self.highs.getSolution().col_value), bound, True)


def _taken(status: highspy.HighsStatus) -> None:
    assert status != highspy.HighsStatus.kError, "HiGHS refused rows: what it would solve is another program"


def _program(model: Model, fixed: Mapping[int, float]) -> highspy.HighsLp:
    n, n_rows = len(model.cost), model.n_rows
    program = highspy.HighsLp()
    program.num_col_, program.num_row_, program.offset_ = n, n_rows, model.offset
    program.col_cost_ = np.array(model.cost)
    lower, upper = np.zeros(n), np.ones(n)
    where = list(fixed)
    lower[where] = upper[where] = list(fixed.values())
    program.col_lower_, program.col_upper_ = lower, upper
    program.row_lower_, program.row_upper_ = np.full(n_rows, -math.inf), np.array(model.upper)
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    counts = np.bincount(np.array(model.row_of, dtype=np.int64), minlength=n_rows)
    matrix.start_ = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    matrix.index_ = np.array(model.column_of, dtype=np.int32)
    matrix.value_ = np.array(model.coefficient)
    return program
