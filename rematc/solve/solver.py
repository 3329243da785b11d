"""`solve()`: keep everything if it fits, else a plan by dropping, and then the search that proves it good."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from rematc.errors import BudgetError
from rematc.garbage import garbage_waits
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.regather import advice, gathered_again, shared
from rematc.simulate import Profile, simulate, validate
from rematc.solve.clock import counted, paused
from rematc.solve.deadline import Deadline
from rematc.solve.expand import Written, expand, keep_all, restated
from rematc.solve.improve import Improver, Starts
from rematc.solve.lowest import lowest
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.order import (
    Order,
    best_order,
    needs,
    order_of,
    reordered,
    restored,
    said_of_reordered,
)
from rematc.solve.reduce import reduce
from rematc.solve.refine import Refined, complete
from rematc.solve.search import Found, Search, search
from rematc.solve.spans import tightest
from rematc.solve.spare import spared
from rematc.solve.starts import first_plans, like_known

EXACT_OPS = 10
SEARCH = 0.7  # of the time, where no plan is near the bound: what is left is for making one cheaper
CLOSE = 0.1  # from the bound: a plan so cheap is made cheaper beside the search, if not of a large program
DEFAULT = SolveOptions()
FALLEN_BACK = (
    "the MILP found no cheaper plan within the time limit; this is the greedy one; "
    "a longer time_limit_s may find a cheaper one"
)
CUT = "the clock ended the search: another run, or another machine, may find another plan"


def solve(
    problem: Problem,
    options: SolveOptions = DEFAULT,
    *,
    budget_bytes: int | None = None,
    known: Plan | None = None,
) -> Plan:
    """The cheapest plan for ``problem`` that could be found within the time limit of ``options``.

    ``budget_bytes``, resident included, stands in for the problem's own. ``known`` is a plan of this problem
    to start from, beside others: it, or one near it if it breaks the budget by little. The plan's
    ``bound_ns`` is a lower bound on the cost of every plan that recomputes right before a backward op that
    reads forward memory, with the backward ops in the plan's order: that of ``known``, if it fits, else the
    one that `best_order` prefers, or the graph's. ``status`` is "optimal" (proven within
    ``options.gap``), "feasible", or "greedy" if nothing was found that is cheaper than the greedy plan.
    Raises `BudgetError` if nothing fits; its ``minimum_bytes`` does fit. Raises `PlanError` if ``known`` is
    no plan of this problem.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> plan = solve(Problem(g, (OpCost(5), OpCost(5), OpCost(5))), budget_bytes=28)
    >>> plan.saved, plan.cost_ns, plan.status
    ((1,), 0, 'optimal')
    """
    started = time.monotonic()
    if budget_bytes is not None:
        problem = problem.with_budget(budget_bytes)
    if known is not None:
        simulate(problem, known)
    limit_s = options.for_ops(len(problem.graph.ops))
    with garbage_waits(), counted(limit_s) as clock:
        try:
            plan = _not_keeping(problem, options) if shared(problem.graph) else _plan(problem, options, known)
        except BudgetError as e:
            if not clock.was_cut:
                raise
            raise refusal(problem, replace(e.plan, notes=(*e.plan.notes, CUT)), e.bound_bytes) from None
        if clock.was_cut:
            plan = replace(plan, notes=(*plan.notes, CUT))
        plan = replace(plan, strategy="rematc", solve_s=round(time.monotonic() - started, 3))
        validate(problem, plan)
    return plan


def _is_small(problem: Problem) -> bool:
    """Can it be solved exactly? The MILP does not know of memory that a view beside a result keeps alive."""
    return len(problem.graph.ops) <= EXACT_OPS and not problem.graph.makes_views_beside


def _plan(problem: Problem, options: SolveOptions, known: Plan | None = None) -> Plan:
    """In the order of what is ``known`` and fits, or the best one; if that has no plan, in others.

    A refusal is of the order with the lowest plan, and takes longer where several are tried.
    """
    refused: dict[Order, BudgetError] = {}
    for order in _orders(problem, options, known):
        least = min((e.minimum_bytes for e in refused.values()), default=math.inf)
        if order in refused or (refused and needs(problem, [order])[order][0] >= least):
            continue
        try:
            return _plan_in(order, problem, options, known)
        except BudgetError as e:
            refused[order] = e.with_traceback(None)
    try:
        raise min(refused.values(), key=lambda e: e.minimum_bytes)
    finally:  # else that one and this frame hold each other, and all that callers have: a step's batch
        refused.clear()


def _orders(problem: Problem, options: SolveOptions, known: Plan | None) -> Iterator[Order]:
    """Those to try, one after the other: that of a ``known`` plan first, to look for another takes time."""
    own, budget = problem.graph.backward_steps, problem.budget_bytes
    is_of_use = known is not None and (budget is None or simulate(problem, known).peak_bytes <= budget)
    of_known = [order_of(known, problem)] if known and is_of_use else []
    if _is_small(problem):
        yield from (own, *of_known)
    else:
        yield from of_known
        yield best_order(problem, options.for_ops(len(problem.graph.ops)))
        yield own


def _plan_in(order: Order, problem: Problem, options: SolveOptions, known: Plan | None) -> Plan:
    known = known and said_of_reordered(known, order, problem)
    try:
        return restored(_solve(reordered(problem, order), options, known), order, problem)
    except BudgetError as e:
        e.plan = restored(e.plan, order, problem)
        raise


def _not_keeping(problem: Problem, options: SolveOptions) -> Plan:
    """A plan that keeps nothing of what ranks share. If that breaks the budget, one for a smaller budget."""
    tight, bound_ns = problem, None
    while True:
        try:
            found = _plan(tight, options)
        except BudgetError as e:
            raise refusal(problem, gathered_again(problem, e.plan), e.bound_bytes) from None
        bound_ns = found.bound_ns if bound_ns is None else bound_ns  # of the smallest budget it is none
        plan = _judge(gathered_again(problem, found), bound_ns, options.gap)
        if problem.budget_bytes is None or plan.peak_bytes <= problem.budget_bytes:
            return plan
        assert tight.budget_bytes is not None
        tight = tight.with_budget(tight.budget_bytes - (plan.peak_bytes - problem.budget_bytes))


def _solve(problem: Problem, options: SolveOptions, known: Plan | None) -> Plan:
    whole = unmerged(reduce(problem))
    free = _cheapest(problem, whole)
    if problem.budget_bytes is None or free.peak_bytes <= problem.budget_bytes:
        return free
    if _is_small(problem):
        return _solve_exactly(problem, options)
    little = min(problem.budget_bytes - problem.base_bytes, free.peak_bytes - problem.budget_bytes)
    return _solve_large(problem, merge(whole.core, little), little, options, known)


def _cheapest(problem: Problem, whole: Merged) -> Plan:
    """Everything that is read later is kept, and nothing is recomputed."""
    return replace(expand(problem, whole, keep_all(whole.core)).plan, status="optimal")


def _solve_exactly(problem: Problem, options: SolveOptions) -> Plan:
    found = _exact(problem, options)
    if found.best is None:
        floor = _exact_floor(problem, options)
        raise refusal(problem, floor, floor.peak_bytes)
    return _judge(found.best.plan, found.bound_ns, 0.0 if found.finished else options.gap)


def _exact(problem: Problem, options: SolveOptions) -> Found:
    merged = unmerged(reduce(problem, pauses=1))
    deadline = Deadline.after(options.for_ops(len(problem.graph.ops)))
    return search(problem, merged, complete(merged.core), 0.0, deadline)


def _exact_floor(problem: Problem, options: SolveOptions) -> Plan:
    """The plan with the lowest peak, by bisection: a budget below it has no plan."""
    low = problem.budget_bytes or 0
    best = _cheapest(problem, unmerged(reduce(problem)))
    while low + 1 < best.peak_bytes:
        middle = (low + best.peak_bytes) // 2
        found = _exact(problem.with_budget(middle), options).best
        if found is None:
            low = middle
        else:
            best = found.plan
    return best


def _solve_large(
    problem: Problem, merged: Merged, little: int, options: SolveOptions, known: Plan | None
) -> Plan:
    assert problem.budget_bytes is not None
    limit_s = options.for_ops(len(problem.graph.ops))
    end, if_far = Deadline(limit_s), Deadline(SEARCH * limit_s)  # since solve() was called

    def starts() -> Starts:
        nearest = None if searching.best else searching.nearest
        like = like_known(problem, merged, known, options.gap, end) if known else None
        return first_plans(problem, merged, little, options.gap, end, nearest, like, searching.asked_once)

    def search_anew(bound_ns: int) -> Search:
        refined = Refined(tightest(merged.core))
        return Search(problem, merged, refined, options.gap, improver, bound_ns)

    improver, bound_ns = Improver(problem, starts), 0
    searching = search_anew(bound_ns)
    while True:
        found = searching.run(end, if_far)
        bound_ns = max(bound_ns, found.bound_ns)
        if _is_near(found.best, bound_ns, options.gap):
            return _judge(found.best.plan, bound_ns, options.gap)
        improver.begin(found.best, bound_ns)
        if not improver.searches:  # any plan is worth more than the time limit
            improver.begin_from(_tightest(problem, merged))
            end = max(end, Deadline.after((1 - SEARCH) * limit_s), key=lambda d: d.at)  # a MILP may overrun
        bound_ns = max(bound_ns, improver.bound_ns)
        is_near = _is_near(improver.best, bound_ns, options.gap)
        if searching.is_over and merged.core != merged.full and end.left() > 0 and not is_near:
            merged = unmerged(merged.full)  # as far as merged units can say, all is told apart
            searching, if_far = search_anew(bound_ns), if_far if if_far.left() > 0 else end
            continue
        is_close = _is_near(improver.best, bound_ns, CLOSE) and not searching.was_large
        if if_far is end or searching.is_over or not is_close:
            improver.run((1 + options.gap) * bound_ns, options.gap / 2, end)
        if end.left() <= 0 or searching.is_over or _is_near(improver.best, bound_ns, options.gap):
            break
        if_far = end  # all the time left is for the search, with the improver beside it
    assert improver.best is not None
    plan = _judge(improver.best.plan, bound_ns, options.gap)
    return _fallen_back(plan) if improver.best is improver.greedy and plan.status == "feasible" else plan


def _is_near(found: Written | None, bound_ns: int, gap: float) -> TypeGuard[Written]:
    return found is not None and found.plan.cost_ns <= (1 + gap) * bound_ns


def _tightest(problem: Problem, merged: Merged) -> Written:
    """Where dropping finds nothing that fits: the plan with the lowest peak, or a refusal."""
    assert problem.budget_bytes is not None
    every = merge(merged.full)  # what is small can count here
    start = expand(problem, every, keep_all(every.core))
    limit_s = DEFAULT.for_ops(len(problem.graph.ops))  # that of ``options`` is for cheaper plans
    with paused(limit_s):
        written, bound_bytes = lowest(problem, every, start, Deadline(limit_s))
        within = problem.with_budget(max(problem.budget_bytes, written.plan.peak_bytes))
        written = spared(within, written, Deadline.after(limit_s))
    if written.plan.peak_bytes > problem.budget_bytes:
        raise refusal(problem, replace(written.plan, budget_bytes=problem.budget_bytes), bound_bytes)
    same = restated(problem, merged, written) if merged.small else written
    return same if same.plan.peak_bytes <= problem.budget_bytes else written


def _judge(plan: Plan, bound_ns: int, gap: float) -> Plan:
    bound = min(bound_ns, plan.cost_ns)
    judged = replace(plan, bound_ns=bound, status="feasible")
    return replace(judged, status="optimal") if judged.gap <= gap else judged


def _fallen_back(plan: Plan) -> Plan:
    return replace(plan, status="greedy", notes=(FALLEN_BACK,))


def refusal(problem: Problem, floor: Plan, bound_bytes: int) -> BudgetError:
    """What to say when nothing fits: ``floor`` is the plan with the lowest peak that was found.

    Where the clock ended that search, as a note of it says, so does the error.
    """
    profile: Profile = simulate(problem, floor)
    assert problem.budget_bytes is not None
    error = BudgetError(
        problem.budget_bytes,
        floor.peak_bytes,
        step=profile.peak_name(problem.graph),
        largest=profile.at_peak[:3],
        resident_bytes=problem.resident_bytes,
        bound_bytes=bound_bytes,
        advice=advice(problem.graph),
        was_cut=CUT in floor.notes,
    )
    error.plan = replace(floor, strategy="rematc", status="feasible")
    return error
