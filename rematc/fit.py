"""Solve, lower, look at what the code needs, and solve again with what was learned: until it fits."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged, simulate, validate
from rematc.solve import refusal, solve
from rematc.solve.clock import counted

log = logging.getLogger(__name__)

ROUNDS = 4
HALVES = 2  # of the way from a plan with code that does not fit to that of the lowest peak
SLACK = 0.02  # of the budget: as much may stay unused before another plan is looked for
WORTH = 0.05  # of the cost: what another plan must save to be lowered, which takes seconds
LONG = 3  # times the ops of the cheapest plan that is as low: it takes as long to lower
FIRST, LATER = 0.7, 0.4  # of the time limit, for a round: to lower what it finds takes longer
LEAST_S = 1.0  # with less the solver finds a plan far too dear

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
    (what is done in place). The difference at one plan is taken for that of the next, lowered in turn; where
    the code of the next needs no less, plans that need far less by the graph are tried. The bound is the
    lowest of all rounds: it holds for each difference that was met. Raises `BudgetError`,
    with the smallest budget that is accepted, where no code fits. A plan that is ``given`` is tried first,
    and taken if its code fits.
    """
    if given is not None and _fits(found := _lowered(problem, judged(problem, given), peak_of_code)):
        return Fitted(found.problem, _noted(found.plan))
    best: Fitted | None = None
    learned, solver, needed = problem, _Solver(options), math.inf
    tried: Problem | None = None
    plan: Plan | None = None
    for _ in range(ROUNDS):
        try:
            plan = solver.solved(learned, plan)
        except BudgetError as e:
            if best or tried:
                break
            found = best = _smallest(problem, peak_of_code, e.plan, solver)
        else:
            if best and plan.cost_ns > (1 - WORTH) * best.plan.cost_ns:
                break
            found, tried = _lowered(learned, plan, peak_of_code), learned
            best = found if _fits(found) else best
        if (_fits(found) and _is_full(found)) or found.problem == learned:
            break
        if not best and found.plan.peak_bytes >= needed:
            break  # it needs too much in a place where the graph says nothing of it
        learned, needed = found.problem, found.plan.peak_bytes
    if best is None:
        assert tried
        floor = _lowest(problem, solver)
        best = _between(problem, floor, tried, peak_of_code, solver)
        best = best or _smallest(problem, peak_of_code, floor, solver)
    return Fitted(best.problem, solver.accounted(best.plan, options.gap))


@dataclass
class _Solver:
    """Solves, and keeps account of the time, real and counted, and of the lowest bound that was proven."""

    options: SolveOptions
    seconds: float = 0.0
    counted_s: float = 0.0
    bound_ns: int | None = None

    def solved(self, problem: Problem, known: Plan | None = None) -> Plan:
        limit_s = self.options.for_ops(len(problem.graph.ops))
        left_s = max(LEAST_S, LATER * limit_s, FIRST * limit_s - self.counted_s)
        started = time.monotonic()
        with counted() as clock:
            try:
                plan = solve(problem, replace(self.options, time_limit_s=left_s), known=known)
            finally:
                self.seconds += time.monotonic() - started
                self.counted_s += clock.done
        self.bound_ns = plan.bound_ns if self.bound_ns is None else min(self.bound_ns, plan.bound_ns)
        return plan

    def accounted(self, plan: Plan, gap: float) -> Plan:
        """``plan`` with the account, and what that proves."""
        bound_ns = min(self.bound_ns or 0, plan.cost_ns)
        known = _noted(replace(plan, bound_ns=bound_ns, solve_s=round(self.seconds, 3)))
        if plan.status == "optimal":
            return known if known.gap <= gap else replace(known, status="feasible")
        return replace(known, status="optimal") if not known.gap else known


def _noted(plan: Plan) -> Plan:
    """Who recomputes nothing, or proves nothing, needs no bound explained."""
    if not plan.cost_ns or plan.status == "baseline":
        return plan
    return replace(plan, notes=tuple(dict.fromkeys((*plan.notes, NOTE))))


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


def _between(
    problem: Problem, floor: Plan, tried: Problem, peak_of_code: PeakOfCode, solver: _Solver
) -> Fitted | None:
    """The cheapest plan with code that fits, of some that need less by the graph than that for ``tried``.

    They are between it and the lowest peak, by halves. What the code needs can fall all at once.
    """
    assert problem.budget_bytes is not None
    best: Fitted | None = None
    low, high = floor.peak_bytes, problem.budget_bytes + problem.lowering_bytes - tried.lowering_bytes
    for _ in range(HALVES):
        middle = (low + high) // 2
        less = replace(problem, lowering_bytes=problem.lowering_bytes + problem.budget_bytes - middle)
        try:
            found = _lowered(less, solver.solved(less), peak_of_code)
        except BudgetError:
            break
        if _fits(found):
            low, best = middle, min(best or found, found, key=lambda f: f.plan.cost_ns)
        else:
            high = middle
    return best


def _smallest(problem: Problem, peak_of_code: PeakOfCode, floor: Plan, solver: _Solver) -> Fitted:
    """The plan of the lowest peak that the graph has, or the cheapest as low, whose code may need less.

    The cheaper one of those whose code fits; else `BudgetError`. ``floor``: the plan of the lowest peak. It
    is not lowered where it is `LONG`, as it is if it makes all anew for each op.
    """
    cheapest = floor
    with suppress(BudgetError):  # the clock may end this search before it has found as much
        cheapest = solver.solved(problem.with_budget(floor.peak_bytes), floor)
    lowest = _lowered(problem, judged(problem, cheapest), peak_of_code)
    is_other = cheapest.cost_ns < floor.cost_ns and len(floor.backward) <= LONG * len(cheapest.backward)
    if is_other and not _fits(lowest):
        other = _lowered(problem, judged(problem, floor), peak_of_code)
        lowest = min(lowest, other, key=lambda f: f.plan.peak_bytes)
    if _fits(lowest):
        return lowest
    told = replace(lowest.plan, notes=tuple(dict.fromkeys((*lowest.plan.notes, *floor.notes))))
    raise refusal(lowest.problem, told, bound_bytes=0) from None


def _lowest(problem: Problem, solver: _Solver) -> Plan:
    try:
        return solver.solved(problem.with_budget(1))
    except BudgetError as e:
        plan: Plan = e.plan
        return plan
