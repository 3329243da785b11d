"""A lower bound on the cost of any plan: the LP of a relaxation."""

from __future__ import annotations

from datetime import timedelta

from ortools.math_opt.python import mathopt

from rematc.solve.formulate import Pairs, formulate
from rematc.solve.merge import Merged
from rematc.solve.milp import floor_ns


def lower_bound(merged: Merged, budget_bytes: int, pairs: Pairs | None, time_limit_s: float) -> int:
    """Nanoseconds that recomputation takes at least under the budget; 0 if there was no time to say.

    What ``pairs`` leaves out is allowed for nothing but its own time, and the blocks that are kept
    for good in ``merged`` are given back to the budget: so the bound holds for the whole problem.
    """
    f = formulate(merged.core, budget_bytes + merged.slack_bytes, pairs, relaxed=True)
    for x in f.model.variables():
        x.integer = False
    limit = mathopt.SolveParameters(time_limit=timedelta(seconds=max(0.1, time_limit_s)), random_seed=1)
    result = mathopt.solve(f.model, mathopt.SolverType.HIGHS, params=limit)
    if result.termination.reason is not mathopt.TerminationReason.OPTIMAL:
        return 0
    return floor_ns(f, result.termination.objective_bounds.dual_bound)
