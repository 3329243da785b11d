"""Solve, lower, look at what the code needs, and solve again with what was learned: until it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged, simulate, validate
from rematc.solve import refusal, solve

log = logging.getLogger(__name__)

ROUNDS = 4
SLACK = 0.02  # of the budget: as much may stay unused before another plan is looked for
WORTH = 0.05  # of the cost: what another plan must save to be lowered, which takes seconds
LEAST_S = 1.0

NOTE = "the bound is for what the compiler fuses here, and for the difference of its code to the graph"

PeakOfCode = Callable[[Plan], int]  # what a plan's code needs, resident included


@dataclass(frozen=True)
class Fitted:
    """A plan, and its problem with the ``lowering_bytes`` that its code was found to need."""

    problem: Problem
    plan: Plan


def fit(
    problem: Problem, options: SolveOptions, peak_of_code: PeakOfCode, given: Plan | None = None
) -> Fitted:
    """The cheapest plan found whose lowered code stays within the budget.

    The solver counts what the graph says, the code needs more (an order that the compiler changed) or less
    (what is done in place). The difference at one plan is taken for that of the next, lowered in turn.
    The bound is the lowest of all rounds: it holds for each difference that was met. Raises `BudgetError`,
    with the smallest budget that is accepted, where no code fits. A plan that is ``given`` is tried first,
    and taken if its code fits.
    """
    if given is not None and _fits(found := _lowered(problem, judged(problem, given), peak_of_code)):
        return Fitted(found.problem, _noted(found.plan))
    best: Fitted | None = None
    floor: Plan | None = None
    learned, solve_s, bound_ns = problem, 0.0, None
    limit_s = options.for_ops(len(problem.graph.ops))
    for _ in range(ROUNDS):
        left_s = max(LEAST_S, limit_s - solve_s)
        try:
            plan = solve(learned, replace(options, time_limit_s=left_s))
        except BudgetError as e:
            floor = e.plan if learned is problem else None
            break
        solve_s += plan.solve_s
        bound_ns = plan.bound_ns if bound_ns is None else min(bound_ns, plan.bound_ns)
        if best is not None and plan.cost_ns > (1 - WORTH) * best.plan.cost_ns:
            break
        found = _lowered(learned, plan, peak_of_code)
        if _fits(found):
            best = found
        if (_fits(found) and _is_full(found)) or found.problem == learned:
            break
        learned = found.problem
    if best is None:
        return _smallest(problem, options, peak_of_code, floor)
    assert bound_ns is not None
    return Fitted(best.problem, _bounded(best.plan, bound_ns, round(solve_s, 3), options.gap))


def _bounded(plan: Plan, bound_ns: int, solve_s: float, gap: float) -> Plan:
    bounded = _noted(replace(plan, bound_ns=min(bound_ns, plan.bound_ns), solve_s=solve_s))
    proven = bounded.status != "optimal" or bounded.gap <= gap
    return bounded if proven else replace(bounded, status="feasible")


def _noted(plan: Plan) -> Plan:
    """Who recomputes nothing, or proves nothing, needs no bound explained."""
    return replace(plan, notes=(*plan.notes, NOTE)) if plan.cost_ns and plan.status != "baseline" else plan


def _lowered(problem: Problem, plan: Plan, peak_of_code: PeakOfCode) -> Fitted:
    profile = simulate(problem, plan)
    said = max(*profile.live_bytes, profile.end_bytes)
    between = profile.between_bytes if problem.meanwhile_bytes else 0
    needed = max(peak_of_code(plan), between)
    more = 0 if said <= needed == between else needed - said  # what is between the passes stays what it is
    learned = replace(problem, lowering_bytes=problem.lowering_bytes + more)
    known = replace(plan, peak_bytes=needed, digest=learned.digest)
    log.info("plan %s: its code needs %+d bytes over the graph's %d", plan.digest, more, said)
    if _fits(Fitted(learned, known)):
        validate(learned, known)
    return Fitted(learned, known)


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


def _smallest(
    problem: Problem, options: SolveOptions, peak_of_code: PeakOfCode, floor: Plan | None
) -> Fitted:
    """The plan of the lowest peak that the graph has, if its code fits; else `BudgetError`.

    Or another as low, that recomputes less. ``floor``: that plan, if it is known.
    """
    floor = floor or _lowest(problem, options)
    found = _lowered(problem, judged(problem, floor), peak_of_code)
    if not _fits(found):
        raise refusal(found.problem, found.plan, bound_bytes=0)
    cheaper = solve(problem.with_budget(floor.peak_bytes), options)
    if cheaper.cost_ns < found.plan.cost_ns:
        other = _lowered(problem, judged(problem, cheaper), peak_of_code)
        found = other if _fits(other) else found
    plan = found.plan
    plan = replace(plan, status="optimal") if plan.cost_ns <= plan.bound_ns else plan
    return Fitted(found.problem, _noted(plan))


def _lowest(problem: Problem, options: SolveOptions) -> Plan:
    try:
        return solve(problem.with_budget(1), options)
    except BudgetError as e:
        plan: Plan = e.plan
        return plan
