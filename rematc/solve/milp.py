"""Solve a formulation, adding the memory rows that its solution turns out to break."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt.python import mathopt

from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate
from rematc.solve.expand import expand
from rematc.solve.formulate import Formulation, add_burst, add_forward
from rematc.solve.merge import Merged

ROUNDS = 20
Reason = mathopt.TerminationReason


@dataclass(frozen=True, slots=True)
class Found:
    """What the solver came to: a plan within the budget, if any, and a lower bound for its model.

    ``finished``: not stopped by the time limit; without a plan the model is then infeasible.
    """

    plan: Plan | None
    bound_ns: int
    finished: bool
    values: Mapping[mathopt.Variable, float] | None = None


def solve_milp(problem: Problem, merged: Merged, f: Formulation, time_limit_s: float, gap: float) -> Found:
    """Solve, simulate, add the memory rows that the simulation breaks, and again until it breaks none."""
    deadline = time.monotonic() + time_limit_s
    bound = 0
    for _ in range(ROUNDS):
        left = deadline - time.monotonic()
        if left <= 0:
            return Found(None, bound, False)
        result = run(f, max(left / 2, min(left, 1.0)), gap)  # the other half is for rows still to come
        reason = result.termination.reason
        if reason in (Reason.INFEASIBLE, Reason.INFEASIBLE_OR_UNBOUNDED):
            return Found(None, bound, True)
        if reason not in (Reason.OPTIMAL, Reason.FEASIBLE):
            return Found(None, bound, False)
        bound = max(bound, floor_ns(f, result.termination.objective_bounds.dual_bound))
        values = result.variable_values()
        plan = plan_of(problem, merged, f, values)
        if problem.budget_bytes is None or plan.peak_bytes <= problem.budget_bytes:
            return Found(plan, min(bound, plan.cost_ns), reason is Reason.OPTIMAL, values)
        if not add_broken(problem, merged, f, plan):
            return Found(None, bound, False)
    return Found(None, bound, False)


def run(f: Formulation, time_limit_s: float, gap: float) -> mathopt.SolveResult:
    """One call of the solver: HiGHS, which brings a tight LP bound along."""
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=time_limit_s), relative_gap_tolerance=gap, random_seed=1
    )
    return mathopt.solve(f.model, mathopt.SolverType.HIGHS, params=parameters)


def floor_ns(f: Formulation, dual_bound: float) -> int:
    """The solver's lower bound in whole nanoseconds, its rounding errors taken off.

    Costs are whole numbers, so a bound just below one is that number.
    """
    if not math.isfinite(dual_bound):
        return 0
    ns = dual_bound * f.time_unit
    return max(0, math.ceil(ns - 1e-6 * max(1.0, ns)))


def plan_of(
    problem: Problem, merged: Merged, f: Formulation, values: Mapping[mathopt.Variable, float]
) -> Plan:
    """The plan that the variables say."""
    core = f.core
    saved = {merged.full_block[b] for (b, t), x in f.kept.items() if t == 0 and values[x] > 0.5}
    runs: list[list[int]] = [[] for _ in core.stages]
    for (u, t), x in f.again.items():
        if values[x] > 0.5:
            runs[t] += merged.parts[u]
    return expand(problem, merged.full, core.stages, saved | merged.kept, runs)


def add_broken(problem: Problem, merged: Merged, f: Formulation, plan: Plan) -> bool:
    """Add the rows of the runs at which ``plan`` breaks the budget; False if there are none left."""
    assert problem.budget_bytes is not None
    profile = simulate(problem, plan)
    full_unit = {unit.op: u for u, unit in enumerate(merged.full.units)}
    unit = {merged.full.units[p].op: u for u, parts in enumerate(merged.parts) for p in parts}
    stage_of = {s.op: t for t, s in enumerate(f.core.stages) if s.op is not None}
    added = False
    waiting: list[int] = []
    for step, live in zip(profile.steps, profile.live_bytes, strict=True):
        over = live > problem.budget_bytes
        if step.phase == "forward":
            if over and step.op in full_unit:
                added |= add_forward(f, merged, full_unit[step.op])
        elif step.op in unit:
            waiting += [unit[step.op]] * over
        elif step.op in stage_of:
            for u in waiting:
                added |= add_burst(f, u, stage_of[step.op])
            waiting = []
    for u in waiting:
        added |= add_burst(f, u, len(f.core.stages) - 1)
    return added
