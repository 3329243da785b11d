"""Solve, lower, look at what the code needs, and solve again with what was learned: until it fits."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from rematc.errors import BudgetError
from rematc.learn import Knowledge, OpNeed, over_graph
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged, simulate, validate
from rematc.solve import refusal, solve
from rematc.solve.clock import counted

log = logging.getLogger(__name__)

ROUNDS, MORE_ROUNDS = 4, 2  # the latter where no code fits yet, but the last is `ALMOST` in the budget
ALMOST = 0.05
HALVES = 2  # of the way from the budget to the lowest peak, where no round has code that fits
SLACK = 0.02  # of the budget: as much may stay unused before another plan is looked for
WORTH = 0.05  # of the cost: what another plan must save to be lowered, which takes seconds
FAR = 2  # times the bound: a plan so dear is not taken before all rounds are over
LONG = 3  # times the ops of the graph, or of the cheapest plan that is as low: it takes as long to lower
FIRST, LATER = 0.7, 0.4  # of the time limit, for a round: to lower what it finds takes longer
LEAST_S = 1.0  # with less the solver finds a plan far too dear

NOTE = "the bound is for what the compiler fuses here, and for the difference of its code to the graph"
OPEN = "no search was told of all the room that its code leaves, as time or rounds were over"

PeakOfCode = Callable[[Plan], int]  # what a plan's code needs, resident included

NeedsOfOps = Callable[[Plan], Mapping[int, OpNeed]]  # of the ops of a plan's code, as far as known


@dataclass(frozen=True)
class Fitted:
    """A plan, and its problem with the ``lowering_bytes`` that the code was found to need over the graph."""

    problem: Problem
    plan: Plan


def fit(
    problem: Problem,
    options: SolveOptions,
    peak_of_code: PeakOfCode,
    given: Plan | None = None,
    needs_of_ops: NeedsOfOps = lambda plan: {},
) -> Fitted:
    """The cheapest plan found whose lowered code stays within the budget.

    The solver counts what the graph says, the code needs more (copies that a kernel makes, an order that the
    compiler changed) or less (what is done in place). What is learned of it from one plan is said of the
    next, which is lowered in turn. The bound is the lowest of all rounds: it holds for each difference that
    a search was told of, and a plan that leaves more than that is not called optimal. Raises `BudgetError`,
    with the smallest budget that is accepted, where no code fits. A plan that is ``given`` is tried first,
    and taken if its code fits.
    """
    if given is not None and _fits(found := _lowered(problem, given, peak_of_code)):
        return Fitted(found.problem, _noted(found.plan))
    rounds = _Rounds(problem, peak_of_code, needs_of_ops, _Solver(options))
    is_open = True
    while is_open and rounds.has_more():
        is_open = rounds.another()
    best = rounds.best or rounds.between() or rounds.smallest()
    told = _told(problem, best.plan, best.plan.peak_bytes)  # others know the graph, and not what was learned
    plan = rounds.solver.accounted(told.plan, options.gap)
    return Fitted(told.problem, _as_open(plan) if is_open and rounds.best else plan)


class _Rounds:
    """What was learned of ``problem`` by now, and the ``best`` plan whose code fits.

    ``lowest`` is, where the graph has no plan, the one of the lowest peak, or of those as low that of which
    the code needs least. ``tried``: rounds. ``is_nearer``: the code of the last one needs less than that of
    the one before.
    """

    def __init__(
        self, problem: Problem, peak_of_code: PeakOfCode, needs_of_ops: NeedsOfOps, solver: _Solver
    ) -> None:
        self.problem, self.solver, self.knowledge = problem, solver, Knowledge(problem)
        self.peak_of_code, self.needs_of_ops = peak_of_code, needs_of_ops
        self.plan: Plan | None = None  # of the round before
        self.best: Fitted | None = None
        self.lowest: Fitted | None = None
        self.tried, self.is_nearer = 0, False

    def has_more(self) -> bool:
        """May there be another round? There are more where code has almost fit, and none has yet."""
        if self.best and self.solver.is_spent(self.problem) and not self.solver.is_far(self.best.plan):
            return False
        is_almost = self.knowledge.needed <= (1 + ALMOST) * (self.problem.budget_bytes or 0)
        is_coming = is_almost and self.is_nearer and not self.best
        return self.tried < ROUNDS + (MORE_ROUNDS if is_coming else 0)

    def another(self) -> bool:
        """Solve, lower and learn; False if another round is for nothing."""
        self.tried += 1
        near = self.best.plan if self.best else self.plan  # of a plan that fits, what is left is cheaper
        try:
            self.plan = self.solver.solved(self.known, near)
        except BudgetError as e:
            others_come_first = self.best or (self.knowledge.needed < math.inf and not self.lowest)
            return not others_come_first and self._refused(e.plan)
        if self.best and self.plan.cost_ns > (1 - WORTH) * self.best.plan.cost_ns:
            return False
        return self._learn(_lowered(self.known, self.plan, self.peak_of_code))

    def _refused(self, floor: Plan) -> bool:
        """Look at the plan of the lowest peak: its code may need less than the graph says."""
        found, before = self._lowest(self.known, floor), self.lowest
        if before and not _fits(found) and found.plan.peak_bytes >= before.plan.peak_bytes:
            return False
        self.lowest, self.plan = found, found.plan
        return self._learn(found)

    def _learn(self, found: Fitted) -> bool:
        """Is there more to try, now that what was ``found`` is known?"""
        before, needed, plan = self.known, self.knowledge.needed, found.plan
        # What ops need may be true of each plan alone: the last of `ROUNDS` is told nothing more of them.
        was_in_vain = self.tried == ROUNDS - 1 and not _fits(found)
        self.is_nearer = plan.peak_bytes < needed
        self.best = found if _fits(found) else self.best
        best = self.best.plan if self.best else None
        self.knowledge.learn(plan, self.needs_of_ops(plan), best, forgets=was_in_vain)
        if _fits(found):
            is_done = not plan.cost_ns or (_is_full(found) and not _was_held_up(before, self.known, plan))
            return self.known != before and not is_done
        is_of_use = self.is_nearer or was_in_vain or bool(best)  # if nobody knows where it is less
        return self.known.costs != before.costs or (self.known != before and is_of_use)

    @property
    def known(self) -> Problem:
        """What the next round is to solve."""
        return self.knowledge.known

    def _lowest(self, problem: Problem, floor: Plan) -> Fitted:
        """Of ``floor``, the plan of the lowest peak, and the cheapest as low: the cheaper one that fits.

        If the code of neither does, that whose code needs less. ``floor`` is not lowered where it is `LONG`.
        """
        cheapest = floor
        with suppress(BudgetError):  # the clock may end this search before it has found as much
            cheapest = self.solver.solved(problem.with_budget(floor.peak_bytes), floor)
        lowest = _lowered(problem, cheapest, self.peak_of_code)
        is_other = cheapest.cost_ns < floor.cost_ns and len(floor.backward) <= LONG * len(cheapest.backward)
        if is_other and not _fits(lowest):
            lowest = min(lowest, _lowered(problem, floor, self.peak_of_code), key=lambda f: f.plan.peak_bytes)
        notes = tuple(dict.fromkeys((*lowest.plan.notes, *floor.notes)))
        return lowest if _fits(lowest) else replace(lowest, plan=replace(lowest.plan, notes=notes))

    @cached_property
    def _floor(self) -> Plan:
        """That of the lowest peak by the graph."""
        try:
            return self.solver.solved(self.problem.with_budget(1))
        except BudgetError as e:
            plan: Plan = e.plan
            return plan

    def between(self) -> Fitted | None:
        """The cheapest plan whose code fits, of some between the last one and the lowest peak, by halves.

        One that is `LONG` is not lowered: of a ResNet-50 that took more than half an hour, and 10 GB.
        """
        if self.lowest or not self.plan:
            return None
        best: Fitted | None = None
        low, high = self._floor.peak_bytes, simulate(self.problem, self.plan).peak_bytes
        for _ in range(HALVES if low < high else 0):
            middle = (low + high) // 2
            try:
                plan = self.solver.solved(self.problem.with_budget(middle))
            except BudgetError:
                break
            if len(plan.backward) > LONG * len(self.problem.graph.ops):
                low = middle
                continue
            found = _lowered(self.problem, plan, self.peak_of_code)
            if _fits(found):
                low, best = middle, min(best or found, found, key=lambda f: f.plan.cost_ns)
            else:
                high = middle
        return best

    def smallest(self) -> Fitted:
        """The plan of the lowest peak, if its code fits, else `BudgetError`."""
        found = self.lowest or self._lowest(self.problem, self._floor)
        if _fits(found):
            return found
        raise refusal(found.problem, found.plan, bound_bytes=0)


def _was_held_up(before: Problem, known: Problem, plan: Plan) -> bool:
    """Was ``plan`` held up by ops that are now ``known`` to need less than was thought ``before``?"""
    profile, least = simulate(before, plan), (1 - SLACK) * (before.budget_bytes or 0)
    return any(
        live_bytes >= least and known.costs[step.op].workspace_bytes < before.costs[step.op].workspace_bytes
        for step, live_bytes in zip(profile.steps, profile.live_bytes, strict=True)
    )


@dataclass
class _Solver:
    """Solves, and keeps account of the time, real and counted, and of the lowest bound that was proven."""

    options: SolveOptions
    seconds: float = 0.0
    counted_s: float = 0.0
    bound_ns: int | None = None

    def is_spent(self, problem: Problem) -> bool:
        """Have all rounds together had the time limit?"""
        return self.counted_s >= self.options.for_ops(len(problem.graph.ops))

    def is_far(self, plan: Plan) -> bool:
        """Is ``plan`` so dear that another is worth more than the time limit?"""
        return plan.cost_ns > FAR * (self.bound_ns or 0)

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


def _as_open(plan: Plan) -> Plan:
    """Nothing was proven of the room that the code of the last plan leaves: no search was told of it."""
    open_ = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, OPEN))))
    return replace(open_, status="feasible") if plan.cost_ns and plan.status == "optimal" else open_


def _lowered(problem: Problem, plan: Plan, peak_of_code: PeakOfCode) -> Fitted:
    """What the code of ``plan`` needs, and ``problem`` with that."""
    plan = judged(problem, plan)
    between_bytes = simulate(problem, plan).between_bytes if problem.meanwhile_bytes else 0
    found = _told(problem, plan, max(peak_of_code(plan), between_bytes))
    log.info("plan %s: its code peaks at %d bytes", plan.digest, found.plan.peak_bytes)
    return found


def _told(problem: Problem, plan: Plan, peak_bytes: int) -> Fitted:
    """``problem`` with what code that peaks there needs over the graph."""
    more_bytes = over_graph(problem, plan, peak_bytes)
    told = replace(problem, lowering_bytes=problem.lowering_bytes + more_bytes)
    found = Fitted(told, replace(plan, peak_bytes=peak_bytes, digest=told.digest))
    if _fits(found):
        validate(found.problem, found.plan)
    return found


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
