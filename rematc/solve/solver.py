"""`solve()`: the whole search. A greedy plan first, then the MILP, and a lower bound for both.

How much is asked of the MILP depends on the size of the problem:

* *exact* (some ten ops): every backward op is a stage, with a pause before it; all memory rows.
* *whole*: stages are the backward ops that read forward memory; recomputation anywhere.
* *windowed*: the smallest blocks are kept for good, and a unit runs again only within a window of
  stages before it is first read. The bound then comes from an LP of a relaxation, for the whole problem.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import Profile, simulate, validate
from rematc.solve.bound import lower_bound
from rematc.solve.expand import expand
from rematc.solve.formulate import Pairs, add_burst, add_forward, all_pairs, formulate, near
from rematc.solve.greedy import Draft, Tail, greedy, lowest
from rematc.solve.improve import Start, improve, values_of
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.milp import Found, solve_milp
from rematc.solve.reduce import Core, reduce

log = logging.getLogger(__name__)

EXACT_OPS = 10
WHOLE_PAIRS = 3000
WINDOW_PAIRS = 8000
SMALL = 4e-3  # of what the budget leaves for the graphs
DEFAULT = SolveOptions()


def solve(problem: Problem, options: SolveOptions = DEFAULT) -> Plan:
    """The cheapest plan for ``problem`` that could be found within ``options.time_limit_s``.

    Its ``bound_ns`` is a lower bound on the cost of every plan that recomputes, right before a
    backward op that reads forward memory, each op at most once and in forward's order. ``status`` is
    "optimal" (proven within ``options.gap``), "feasible", or "greedy" if the MILP found nothing better.
    Raises `BudgetError` if nothing fits; its ``minimum_bytes`` does fit.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 4, 8), tuple(Value(n, s) for s, n in enumerate("x a b dy dx".split())),
    ...           (Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...            Op("h", "mul", (1, 3), (4,), phase="backward")), (0,), (3,), (2,), (4,))
    >>> plan = solve(Problem(g, (OpCost(5), OpCost(5), OpCost(5)), budget_bytes=28))
    >>> plan.saved, plan.cost_ns, plan.status
    ((1,), 0, 'optimal')
    """
    started = time.monotonic()
    core = reduce(problem)
    if problem.budget_bytes is None or not core.stages:
        plan = _cheapest(problem, core)
    elif _is_small(problem):
        plan = _solve_exactly(problem, options)
    else:
        plan = _solve_large(problem, core, options, started)
    plan = replace(plan, strategy="rematc", solve_s=round(time.monotonic() - started, 3))
    validate(problem, plan)
    return plan


def _is_small(problem: Problem) -> bool:
    return len(problem.graph.ops) <= EXACT_OPS


def _cheapest(problem: Problem, core: Core) -> Plan:
    """No limit: everything that backward reads is saved, and nothing is recomputed."""
    saved = {b for stage in core.stages for b in stage.reads}
    plan = expand(problem, core, core.stages, saved, [() for _ in core.stages])
    return replace(plan, status="optimal")


def _solve_exactly(problem: Problem, options: SolveOptions) -> Plan:
    found = _exact(problem, options)
    if found.plan is None:
        raise _refusal(problem, _exact_floor(problem, options))
    return _judge(found.plan, found.bound_ns, 0.0 if found.finished else options.gap)


def _exact(problem: Problem, options: SolveOptions) -> Found:
    merged = unmerged(reduce(problem, every_op=True, pauses=1))
    f = formulate(merged.core, problem.budget_bytes)
    for u, t in list(f.again):
        add_burst(f, u, t)
    for u in range(len(merged.full.units)):
        add_forward(f, merged, u)
    return solve_milp(problem, merged, f, options.time_limit_s, 0.0)


def _exact_floor(problem: Problem, options: SolveOptions) -> Plan:
    """The plan with the lowest peak, by bisection: a budget below it has no plan."""
    low = problem.budget_bytes or 0
    best = _exact(problem.with_budget(_cheapest(problem, reduce(problem)).peak_bytes), options).plan
    assert best is not None, "saving everything fits into its own peak"
    while low + 1 < best.peak_bytes:
        middle = (low + best.peak_bytes) // 2
        found = _exact(problem.with_budget(middle), options).plan
        if found is None:
            low = middle
        else:
            best = found
    return best


def _solve_large(problem: Problem, core: Core, options: SolveOptions, started: float) -> Plan:
    budget = problem.budget_bytes
    assert budget is not None
    free = _cheapest(problem, core)
    if free.peak_bytes <= budget:
        return free
    deadline = started + options.time_limit_s
    quarter = options.time_limit_s / 4
    for chains in (True, False):  # near the floor a chain's parts have to run apart
        merged, pairs = _shape(problem, core, chains)
        with ThreadPoolExecutor(1) as other:  # OR-Tools works in its own thread while greedy does in ours
            bounding = other.submit(lower_bound, merged, budget, pairs, 2 * quarter)
            draft = greedy(merged.core, budget, time.monotonic() + quarter)
            bound = bounding.result()
        start = Start(expand_draft(problem, merged, draft), {})
        if start.plan.peak_bytes <= budget:
            break
    else:
        return _tightest(problem, core, bound)
    f = formulate(merged.core, budget, pairs and pairs | draft.pairs)
    best = start = Start(start.plan, values_of(f, draft))
    if pairs is None:
        found = solve_milp(problem, merged, f, (deadline - time.monotonic()) / 2, options.gap)
        if not (chains and any(t is not None for _, t in f.rows_of)):  # merged, those rows may ask too much
            bound = max(bound, found.bound_ns)
        if found.plan is not None and found.values is not None and found.plan.cost_ns <= start.plan.cost_ns:
            best = Start(found.plan, found.values)
    plan = improve(problem, merged, f, best, bound * (1 + options.gap), options.gap, deadline)
    if plan is start.plan:
        return _fallen_back(plan, bound)
    return _judge(plan, bound, options.gap)


def _tightest(problem: Problem, core: Core, bound_ns: int) -> Plan:
    """Where nothing better is known to fit: the plan with the lowest peak of all, or a refusal."""
    draft = lowest(Tail(core))
    plan = expand(problem, core, core.stages, draft.saved, draft.runs)
    assert problem.budget_bytes is not None
    if plan.peak_bytes > problem.budget_bytes:
        raise _refusal(problem, plan)
    return _fallen_back(plan, bound_ns)


def expand_draft(problem: Problem, merged: Merged, draft: Draft) -> Plan:
    """The plan that ``draft`` says for the merged core."""
    saved = {merged.full_block[b] for b in draft.saved} | merged.kept
    runs = [[part for u in units for part in merged.parts[u]] for units in draft.runs]
    return expand(problem, merged.full, merged.core.stages, saved, runs)


def _shape(problem: Problem, core: Core, chains: bool) -> tuple[Merged, Pairs | None]:
    """The merged core, and where recomputation is considered: as much as the MILP can bear."""
    whole = merge(core, chains=chains)
    if len(all_pairs(whole.core)) <= WHOLE_PAIRS:
        return whole, None
    assert problem.graph_budget_bytes is not None
    merged = merge(core, int(problem.graph_budget_bytes * SMALL), chains=chains)
    window = len(merged.core.stages)
    while window > 4 and len(near(merged.core, window)) > WINDOW_PAIRS:
        window = window * 4 // 5
    return merged, near(merged.core, window)


def _judge(plan: Plan, bound_ns: int, gap: float) -> Plan:
    bound = min(bound_ns, plan.cost_ns)
    judged = replace(plan, bound_ns=bound, status="feasible")
    return replace(judged, status="optimal") if judged.gap <= gap else judged


def _fallen_back(plan: Plan, bound_ns: int) -> Plan:
    note = "the MILP found no cheaper plan within the time limit; this is the greedy one"
    log.warning("%s; a longer time_limit_s may find a cheaper one", note)
    return replace(plan, bound_ns=min(bound_ns, plan.cost_ns), status="greedy", notes=(note,))


def _refusal(problem: Problem, floor: Plan) -> BudgetError:
    """What to say when nothing fits: ``floor`` is the plan with the lowest peak that was found."""
    profile: Profile = simulate(problem, floor)
    assert problem.budget_bytes is not None
    return BudgetError(
        problem.budget_bytes,
        floor.peak_bytes,
        step=profile.peak_name(problem.graph),
        largest=profile.at_peak[:3],
        resident_bytes=problem.resident_bytes,
    )
