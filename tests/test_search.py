"""The search that serves large problems, held against exhaustive search on small ones, rule by rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings

from benchmarks import corpus
from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate, validate
from rematc.solve import improve, solve, solver
from rematc.solve import nearby as near_by
from rematc.solve.along import along
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.expand import Draft, expand, keep_all
from rematc.solve.formulate import formulate
from rematc.solve.merge import unmerged
from rematc.solve.model import Model, Result
from rematc.solve.order import best_order, reordered
from rematc.solve.reduce import reduce
from rematc.solve.refine import Refined
from rematc.solve.relaxation import Relaxation
from rematc.solve.search import Found, Search, search
from rematc.solve.spans import Spans, every_stage, tightest
from tests import oracle
from tests.dags import random_dag
from tests.graphs import budgets, chain, problems, random_problem, save_all_peak, skip, with_optima

EXACT = SolveOptions(gap=0.0)


@pytest.fixture
def _as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems go the way of large ones, in the order of backward ops that the oracle knows."""
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    monkeypatch.setattr(solver, "best_order", lambda problem, _: problem.graph.backward_steps)


def solved(problem: Problem) -> Plan | None:
    """The plan for a problem that has one; None if the search does not find it, and claims no proof."""
    try:
        return solve(problem, EXACT)
    except BudgetError as e:
        if e.bound_bytes > (problem.budget_bytes or 0):
            raise AssertionError("it claims to know that nothing fits") from e
        return None


@pytest.mark.usefixtures("_as_if_large")
@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 300, 50)], ids=str)
def test_the_bound_is_below_every_plan_and_most_plans_are_optimal(seeds: range) -> None:
    """Exhaustive search knows every plan: in any order, with pauses anywhere."""
    optimal = asked = 0
    for problem, least_ns in with_optima(map(random_problem, seeds)):
        asked += 1
        plan = solved(problem)
        if plan is None:
            continue
        validate(problem, plan)
        assert plan.bound_ns <= least_ns <= plan.cost_ns
        optimal += plan.cost_ns == least_ns
    assert optimal >= 0.98 * asked


def test_the_bound_is_that_of_the_order_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan with the backward ops in that order, found by exhaustive search, costs as much or more."""
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    chosen = [(problem, best_order(problem)) for problem in map(random_problem, range(3000))]
    chosen = [(problem, order) for problem, order in chosen if order != problem.graph.backward_steps]
    assert len(chosen) >= 15
    for problem, order in chosen:
        other = reordered(problem, order)
        for budget in budgets(other):
            best, plan = oracle.search(other.with_budget(budget)), solved(problem.with_budget(budget))
            assert best is not None
            if plan is not None:
                assert plan.bound_ns <= best.cost_ns <= plan.cost_ns


@pytest.mark.parametrize("share", [0.7, 0.85])
@pytest.mark.parametrize("name", ["gpt2_4", "llama_8", "vit", "vgg16", "bart"])
def test_plans_of_real_models_are_proven_near_optimal(name: str, share: float) -> None:
    problem = corpus.load(name)
    peak = simulate(problem, corpus.save_all(problem)).peak_bytes
    plan = solve(problem, budget_bytes=problem.resident_bytes + int(share * (peak - problem.resident_bytes)))
    assert plan.cost_ns > 0
    assert plan.gap <= 0.01


@pytest.mark.usefixtures("_as_if_large")
def test_what_has_nothing_left_to_try_ends_before_its_time() -> None:
    """It went on asking two starting plans in turn, both of which had been freed as a whole."""
    plan = solve(random_problem(100).with_budget(24), SolveOptions(gap=0.0, time_limit_s=300))
    assert plan.solve_s < 60


@pytest.mark.parametrize("name", [pytest.param("vit", marks=pytest.mark.slow), "bart", "mamba"])
def test_the_clock_decides_nothing_unless_it_cuts(name: str) -> None:
    """What is tried, and for how long, is counted in rounds, steps and nodes."""
    problem = corpus.load(name)
    peak = simulate(problem, corpus.save_all(problem)).peak_bytes
    asked = problem.with_budget(problem.resident_bytes + int(0.6 * (peak - problem.resident_bytes)))
    plans = [solve(asked, SolveOptions(time_limit_s=limit)) for limit in (60, 200)]
    assert plans[0].solve_s < 20
    assert replace(plans[0], solve_s=0.0) == replace(plans[1], solve_s=0.0)


def test_a_round_that_the_clock_cut_far_from_the_bound_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the clock had cut it: a bound of half as much, and not finished. To refine only takes longer."""
    problem = chain(40, ns=100)
    asked = problem.with_budget(save_all_peak(problem) * 2 // 3)
    merged = unmerged(reduce(asked))
    monkeypatch.setattr(near_by, "WHOLE", -1)
    solved, rounds = Model.solve, list[Result]()

    def cut_short(model: Model, **limits: Any) -> Result:
        result = solved(model, **limits)
        rounds.append(replace(result, bound=result.bound / 2, finished=False))
        return rounds[-1]

    relaxed = Relaxation.solve

    def loose(relaxation: Relaxation, limit_s: float) -> Result:
        result = relaxed(relaxation, limit_s)
        return replace(result, bound=result.bound / 2)

    start = Refined(tightest(merged.core))
    whole = search(asked, merged, start.within(0), 0.0, Deadline.after(60))
    monkeypatch.setattr(Model, "solve", cut_short)
    monkeypatch.setattr(Relaxation, "solve", loose)
    found = search(asked, merged, start, 0.0, Deadline.after(60))
    assert whole.finished and len(rounds) == 1
    assert not found.finished and 0 < found.bound_ns < whole.bound_ns


def without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first MILP is cut short before there is a solution or a bound."""
    monkeypatch.setattr(near_by, "WHOLE", -1)
    solved, calls = Model.solve, count()

    def first_in_vain(model: Model, **limits: Any) -> Result:
        if any(model.integer) and not next(calls):
            return Result(None, 0.0, finished=False)
        return solved(model, **limits)

    monkeypatch.setattr(Model, "solve", first_in_vain)


def test_a_search_that_had_too_little_time_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(14, ns=100)
    asked = problem.with_budget(save_all_peak(problem) * 2 // 3)
    merged = unmerged(reduce(asked))
    whole = search(asked, merged, Refined(tightest(merged.core)), 0.0, Deadline.after(60))
    assert whole.best is not None
    without_the_first(monkeypatch)
    searching = Search(asked, merged, Refined(tightest(merged.core)), 0.0)
    first = searching.run(Deadline.after(60))
    assert (first.best, searching.is_over) == (None, False)
    assert first.bound_ns <= whole.bound_ns  # that of the relaxation
    then = searching.run(Deadline.after(60))
    assert then.best is not None and searching.is_over
    assert then.best.plan.cost_ns == then.bound_ns == whole.best.plan.cost_ns == whole.bound_ns


def test_where_the_search_overran_and_found_nothing_a_plan_is_made_cheaper_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`make demo` had the greedy plan at its smallest budget, at 6 times the time."""
    problem, left = chain(14, ns=100), list[float]()

    def overrun(*_: object) -> Found:
        spend(100.0)
        return Found(None, 0, finished=False)

    def improved(*args: Any) -> None:
        left.append(args[3].left())

    monkeypatch.setattr(Search, "run", overrun)
    monkeypatch.setattr(improve.Improver, "begin", lambda *_: None)  # there is no plan to start from
    monkeypatch.setattr(improve.Improver, "run", improved)
    solve(problem.with_budget(save_all_peak(problem) * 2 // 3), SolveOptions(time_limit_s=60))
    assert left[0] == pytest.approx(18.0)


def test_time_that_the_improver_leaves_is_the_searchs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(14, ns=100)
    asked = problem.with_budget(save_all_peak(problem) * 2 // 3)
    whole = solve(asked, EXACT)
    without_the_first(monkeypatch)
    plan = solve(asked, EXACT)
    assert (plan.status, plan.cost_ns, plan.bound_ns) == ("optimal", whole.cost_ns, whole.cost_ns)


@pytest.mark.slow
@pytest.mark.usefixtures("_as_if_large")
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(300, 2000, 100)], ids=str)
def test_the_bound_holds_on_many_more(seeds: range) -> None:
    test_the_bound_is_below_every_plan_and_most_plans_are_optimal(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(500, 2000, 100)], ids=str)
def test_cost_equals_that_of_an_exhaustive_search_on_many_more(seeds: range) -> None:
    for asked, least_ns in with_optima(map(random_problem, seeds)):
        assert solve(asked).cost_ns == least_ns


@settings(max_examples=40)
@given(problems(ops=9))
def test_fewer_spans_and_any_order_are_relaxations(problem: Problem) -> None:
    """Each step from one span for all to every stage alone can only raise the bound."""
    core = reduce(problem)
    budget = budgets(problem)[0]
    whole, single = Spans((0,), len(core.stages)), every_stage(core)
    bounds = []
    for spans in (whole, tightest(core), single):
        f = formulate(core, budget, spans)
        result = f.model.solve(gap=0.0)
        bounds.append(f.floor_ns(result.bound) if result.values is not None else float("inf"))
    assert bounds == sorted(bounds)


@pytest.mark.parametrize(
    "problem",
    [chain(40, ns=100), skip(9), Problem.from_networkx(random_dag(3))],
    ids=["chain", "skip", "dag"],
)
def test_dropping_fits_or_says_that_it_found_nothing(problem: Problem) -> None:
    merged = unmerged(reduce(problem))
    high = expand(problem, merged, keep_all(merged.core)).plan.peak_bytes
    for share in (0.3, 0.6, 0.8, 1.0):
        asked = problem.with_budget(int(share * high))
        written = drop(asked, merged)
        if written is not None:
            assert written.plan.peak_bytes <= asked.budget_bytes
    assert drop(problem.with_budget(high), merged).plan.cost_ns == 0


def test_what_is_made_from_scratch_keeps_nothing() -> None:
    draft = along(reduce(chain(6)))
    assert draft.saved == frozenset()
    assert sum(map(len, draft.runs)) > 6


def test_a_stage_too_large_gets_a_span_of_its_own() -> None:
    assert Spans((0,), 9).alone([3, 8]).starts == (0, 3, 4, 8)


def test_a_draft_says_what_is_saved() -> None:
    problem = chain(4)
    merged = unmerged(reduce(problem))
    nothing = Draft(frozenset(), along(merged.core).runs)
    assert expand(problem, merged, nothing).plan.saved == ()


def test_what_a_draft_runs_for_nobody_is_left_out() -> None:
    problem = chain(4)
    core = reduce(problem)
    every = tuple(range(len(core.units)))
    wasteful = Draft(keep_all(core).saved, tuple(every for _ in core.stages))
    plan = expand(problem, unmerged(core), wasteful).plan
    alive = set(problem.graph.gradients)
    for i in reversed(plan.backward):
        op = problem.graph.ops[i]
        assert op.phase == "backward" or alive.intersection(op.outputs)
        alive = (alive - set(op.outputs)) | set(op.inputs)


def test_a_budget_can_be_given_to_solve() -> None:
    problem = chain(12, ns=100)
    budget = save_all_peak(problem) - 3
    assert solve(problem, budget_bytes=budget).budget_bytes == budget


def test_one_second_is_enough_for_a_plan_and_a_bound() -> None:
    problem = chain(80, ns=100)
    asked = problem.with_budget(save_all_peak(problem) * 7 // 10)
    plan = solve(asked, SolveOptions(time_limit_s=1))
    validate(asked, plan)
    assert 0 < plan.bound_ns <= plan.cost_ns


def test_refining_a_copy_leaves_the_first_alone() -> None:
    first = Refined(Spans((0,), 4))
    second = first.within(0)
    second.in_order.add((0, 1))
    assert not first.in_order
    assert first.bounds_all
    assert not second.bounds_all
