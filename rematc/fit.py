"""Solve, lower, look at what the code needs, and solve again with what was learned: until it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import solve

log = logging.getLogger(__name__)

ROUNDS = 4
SLACK = 0.02  # of the budget: as much may stay unused before another plan is looked for
WORTH = 0.05  # of the cost: what another plan must save to be lowered, which takes seconds
LEAST_S = 1.0

PeakOfCode = Callable[[Plan], int]  # what a plan's code needs, resident included


@dataclass(frozen=True)
class Fitted:
    """A plan, and its problem with the ``lowering_bytes`` that its code was found to need."""

    problem: Problem
    plan: Plan


def fit(problem: Problem, options: SolveOptions, peak_of_code: PeakOfCode) -> Fitted:
    """The cheapest plan found whose lowered code stays within the budget.

    The solver counts what the graph says, the code needs more (an order that the compiler changed) or less
    (what is done in place). The difference at one plan is taken for that of the next, lowered in turn.
    Raises `BudgetError`, with the smallest budget that is accepted, where no code fits.
    """
    best: Fitted | None = None
    learned, solve_s = problem, 0.0
    for _ in range(ROUNDS):
        left_s = max(LEAST_S, options.time_limit_s - solve_s)
        try:
            plan = solve(learned, replace(options, time_limit_s=left_s))
        except BudgetError:
            break
        solve_s += plan.solve_s
        if best is not None and plan.cost_ns > (1 - WORTH) * best.plan.cost_ns:
            break
        plan = replace(plan, solve_s=round(solve_s, 3))
        found = _lowered(learned, plan, peak_of_code)
        if _fits(found) and (best is None or found.plan.cost_ns < best.plan.cost_ns):
            best = found
        if (_fits(found) and _is_full(found)) or found.problem == learned:
            break
        learned = found.problem
    return best or _smallest(problem, options, peak_of_code)


def _lowered(problem: Problem, plan: Plan, peak_of_code: PeakOfCode) -> Fitted:
    more = peak_of_code(plan) - plan.peak_bytes
    learned = replace(problem, lowering_bytes=problem.lowering_bytes + more)
    judged = replace(plan, peak_bytes=plan.peak_bytes + more, digest=learned.digest)
    log.info("plan %s: its code needs %+d bytes over the graph's %d", plan.digest, more, plan.peak_bytes)
    if _fits(Fitted(learned, judged)):
        validate(learned, judged)
    return Fitted(learned, judged)


def _fits(found: Fitted) -> bool:
    budget = found.problem.budget_bytes
    return budget is None or found.plan.peak_bytes <= budget


def _is_full(found: Fitted) -> bool:
    """Would more room make no cheaper plan?"""
    budget = found.problem.graph_budget_bytes
    if budget is None or not found.plan.cost_ns:
        return True
    assert found.problem.budget_bytes is not None
    return found.problem.budget_bytes - found.plan.peak_bytes <= SLACK * budget


def _smallest(problem: Problem, options: SolveOptions, peak_of_code: PeakOfCode) -> Fitted:
    """The plan of the lowest peak that the graph has, if its code fits; else `BudgetError`."""
    assert problem.budget_bytes is not None
    try:
        solve(problem.with_budget(1), options)
    except BudgetError as e:
        refusal = e
    lowest = problem.with_budget(refusal.minimum_bytes)
    found = _lowered(lowest, solve(lowest, options), peak_of_code)
    found = Fitted(
        found.problem.with_budget(problem.budget_bytes),
        replace(found.plan, budget_bytes=problem.budget_bytes),
    )
    if _fits(found):
        return found
    raise BudgetError(
        problem.budget_bytes,
        found.plan.peak_bytes,
        step=refusal.step,
        largest=refusal.largest,
        resident_bytes=problem.resident_bytes,
    )
