"""The solver against exhaustive search, and what its plans promise."""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from benchmarks import corpus
from rematc.baselines import STRATEGIES, recompute_all
from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.simulate import simulate, validate
from rematc.solve import solve, starts
from rematc.solve.solver import EXACT_OPS
from tests import oracle
from tests.graphs import (
    budgets,
    chain,
    problems,
    random_problem,
    save_all_peak,
    skip,
    with_optima,
    with_views_beside,
)

FAST = SolveOptions(time_limit_s=2)


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 500, 50)], ids=str)
def test_cost_equals_that_of_an_exhaustive_search(seeds: range) -> None:
    """500 random graphs of up to 10 ops, each at up to five budgets from its minimum to saving all."""
    for asked, least_ns in with_optima(map(random_problem, seeds)):
        assert len(asked.graph.ops) <= EXACT_OPS
        plan = solve(asked)
        assert (plan.cost_ns, plan.bound_ns, plan.status) == (least_ns, least_ns, "optimal")
        validate(asked, plan)


@pytest.mark.parametrize("seed", range(40))
def test_smallest_budget_is_the_real_one_and_is_accepted(seed: int) -> None:
    problem = random_problem(seed)
    low = oracle.minimum_peak(problem)
    with pytest.raises(BudgetError) as refused:
        solve(problem.with_budget(low - 1))
    assert refused.value.minimum_bytes == low
    assert refused.value.budget_bytes == low - 1
    assert len(refused.value.largest) <= 3
    assert solve(problem.with_budget(low)).peak_bytes == low


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 400, 100)], ids=str)
def test_a_view_beside_what_an_op_makes_is_no_memory_of_its_own(seeds: range) -> None:
    """No bound is above the cost, or the peak, of a plan that there is, and most plans are the cheapest."""
    plans, found, above = 0, 0, [0]
    for seed in seeds:
        rng = random.Random(seed)
        problem = with_views_beside(random_problem(rng, 9), rng)
        for asked, least_ns in with_optima([problem] if problem else []):
            assert asked.graph.makes_views_beside
            plans += 1
            try:
                plan = solve(asked)
            except BudgetError as e:
                above.append(e.bound_bytes - e.budget_bytes)
            else:
                assert plan.bound_ns <= least_ns
                found += plan.cost_ns == least_ns
        if problem:
            with pytest.raises(BudgetError) as refused:
                solve(problem, budget_bytes=1)
            above.append(refused.value.bound_bytes - oracle.minimum_peak(problem))
    assert max(above) == 0 and found > 0.85 * plans > 20


def test_no_limit_is_the_cheapest_plan() -> None:
    for problem in (chain(30), skip(6), *map(random_problem, range(30))):
        plan = solve(problem)
        assert (plan.cost_ns, plan.bound_ns, plan.gap, plan.status) == (0, 0, 0.0, "optimal")


def large() -> list[Problem]:
    return [chain(40, ns=100), skip(9)]


@pytest.mark.parametrize("problem", large(), ids=["chain", "skip"])
def test_large_plans_hold_the_budget_and_no_baseline_is_cheaper(problem: Problem) -> None:
    with pytest.raises(BudgetError) as refused:
        solve(problem.with_budget(1), FAST)
    low, high = refused.value.minimum_bytes, save_all_peak(problem)
    for share in (0.0, 0.3, 0.6, 1.0):
        asked = problem.with_budget(int(low + share * (high - low)))
        plan = solve(asked, FAST)
        validate(asked, plan)
        assert (plan.bound_ns > 0) == (plan.cost_ns > 0), "a plan that costs has a bound that says something"
        assert plan.bound_ns <= plan.cost_ns
        for name, strategy in STRATEGIES.items():
            other = strategy(asked, FAST)
            if other.peak_bytes <= asked.budget_bytes:
                assert other.cost_ns >= plan.bound_ns, f"{name} refutes the lower bound"


@pytest.mark.parametrize("problem", large(), ids=["chain", "skip"])
def test_what_is_taken_between_the_passes_leaves_less_to_keep(problem: Problem) -> None:
    high = save_all_peak(problem)
    plain = solve(problem.with_budget(high), FAST)
    taken = replace(problem, meanwhile_bytes=high // 2, budget_bytes=high)
    plan = solve(taken, FAST)
    profile = validate(taken, plan)
    assert profile.between_bytes <= high
    assert plan.cost_ns > plain.cost_ns == 0
    assert plan.status == "optimal"
    taken = replace(problem, meanwhile_bytes=2 * high, budget_bytes=high)
    with pytest.raises(BudgetError, match="what runs between forward and backward") as refused:
        solve(taken, FAST)
    least = refused.value.minimum_bytes
    returned = simulate(taken, recompute_all(problem)).between_bytes
    assert solve(taken.with_budget(least), FAST).peak_bytes == least == returned


@settings(max_examples=25)
@given(problems(ops=10))
def test_a_larger_budget_never_costs_more(problem: Problem) -> None:
    costs = [solve(problem.with_budget(b)).cost_ns for b in budgets(problem)]
    assert all(a >= b for a, b in itertools.pairwise(costs))


def test_the_same_problem_gives_the_same_plan() -> None:
    problem = random_problem(5)
    asked = problem.with_budget(budgets(problem)[0])
    first, second = solve(asked), solve(asked)
    assert (first.saved, first.backward) == (second.saved, second.backward)


def test_when_the_time_is_up_the_greedy_plan_is_given_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "plans_of_chains", lambda *_: [])  # as for a graph that is no chain
    problem = corpus.load("gpt2_2")
    budget = save_all_peak(problem) * 4 // 5
    plan = solve(problem.with_budget(budget), SolveOptions(time_limit_s=0.01))
    validate(problem.with_budget(budget), plan)
    assert plan.status == "greedy"
    assert "greedy" in plan.notes[0]


def test_every_plan_tells_its_numbers() -> None:
    problem = chain(12, ns=100)
    budget = save_all_peak(problem) - 3
    plan = solve(problem.with_budget(budget), FAST)
    assert plan.budget_bytes == budget
    assert plan.peak_bytes == simulate(problem, plan).peak_bytes <= budget
    assert plan.strategy == "rematc"
    assert plan.solve_s > 0
    assert plan.digest == problem.digest


def test_a_refusal_says_whether_it_is_proven() -> None:
    refused = [
        str(BudgetError(100, 120, step="mm", largest=(), bound_bytes=bound)) for bound in (0, 80, 101, 120)
    ]
    assert [text.startswith("a budget of 100 B can't be met") for text in refused] == [
        False,
        False,
        True,
        True,
    ]
    assert refused[1].startswith(
        "no plan was found for a budget of 100 B: the smallest that there is a plan for"
    )
    assert "no plan can do with less than 80 B" in refused[1]


def test_garbage_is_not_looked_for_meanwhile_and_again_afterwards() -> None:
    phases: list[str] = []

    def note(phase: str, info: object) -> None:
        phases.append(phase)

    long, short = chain(400).with_budget(400), chain(40).with_budget(1)
    gc.collect()  # and so none is due
    gc.callbacks.append(note)
    try:
        solve(long, FAST)
        assert phases in ([], ["start", "stop"])  # that of afterwards
        with pytest.raises(BudgetError):
            solve(short, FAST)
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
