"""A plan that is known: to start from where the search finds no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import corpus
from rematc.baselines import STRATEGIES, save_all
from rematc.errors import BudgetError, PlanError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate
from rematc.solve import solve, solver, starts
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.expand import expand, keep_all, written_again
from rematc.solve.merge import merge, unmerged
from rematc.solve.order import (
    best_order,
    needs,
    order_of,
    orders,
    reordered,
    restored,
    said_of_reordered,
)
from rematc.solve.reduce import reduce
from rematc.solve.search import Found, Search
from tests.graphs import random_problem, with_optima
from tests.test_order import head, kept


@pytest.mark.parametrize("name", ["gpt2_2", "unet", "mlp"])
def test_a_plan_is_written_again_as_it_was(name: str) -> None:
    problem = corpus.load(name)
    whole = unmerged(reduce(problem))
    peak_bytes = expand(problem, whole, keep_all(whole.core)).plan.peak_bytes
    asked = problem.with_budget(problem.base_bytes + (peak_bytes - problem.base_bytes) * 8 // 10)
    for merged in (whole, merge(whole.core)):
        dropped = drop(asked, merged)
        assert dropped and dropped.plan.cost_ns > 0
        again = written_again(asked, merged, dropped.plan)
        assert again and again.plan == dropped.plan


def test_a_plan_of_another_order_is_not_written_again() -> None:
    problem = corpus.load("vgg16")
    own, other, *_ = orders(problem)
    assert other != own
    plan, core = STRATEGIES["save_all"](problem, SolveOptions()), unmerged(reduce(reordered(problem, other)))
    said = said_of_reordered(plan, other, problem)
    assert restored(said, other, problem).backward == plan.backward
    assert written_again(reordered(problem, other), core, said) is None


def test_the_search_for_the_lowest_peak_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = corpus.load("gpt2_2")
    with pytest.raises(BudgetError) as refused:
        solve(problem, budget_bytes=1)
    asked, floor = problem.with_budget(refused.value.minimum_bytes), refused.value.plan
    found = solve(asked)
    monkeypatch.setattr(solver, "lowest", lambda *_: pytest.fail("searched for the lowest peak"))
    assert replace(solve(asked, known=floor), solve_s=0) == replace(found, solve_s=0)
    with pytest.raises(pytest.fail.Exception, match="searched"):
        solve(asked, known=STRATEGIES["save_all"](problem, SolveOptions()))  # does not fit


@pytest.mark.parametrize("name", ["gpt2_2", "unet"])
def test_of_a_plan_that_breaks_the_budget_by_little_one_near_it_is_a_start(name: str) -> None:
    problem = corpus.load(name)
    whole = unmerged(reduce(problem))
    peak_bytes = expand(problem, whole, keep_all(whole.core)).plan.peak_bytes
    asked = problem.with_budget(problem.base_bytes + (peak_bytes - problem.base_bytes) * 8 // 10)
    known = solve(problem.with_budget(asked.budget_bytes + (peak_bytes - problem.base_bytes) // 100))
    assert known.peak_bytes > asked.budget_bytes
    again = reordered(asked, best_order(asked))
    said = said_of_reordered(known, best_order(asked), asked)
    merged = merge(reduce(again), peak_bytes - asked.budget_bytes)
    like = starts.like_known(again, merged, said, 0.01, Deadline.after(60))
    assert like is not None and like.plan.peak_bytes <= asked.budget_bytes
    assert like.plan.cost_ns <= 1.1 * solve(asked).cost_ns
    fits = starts.like_known(again, merged, like.plan, 0.01, Deadline.after(60))
    assert fits is not None and fits.plan == like.plan
    none = starts.first_plans(again, merged, 0, 0.01, Deadline.after(60)).plans
    assert like in starts.first_plans(again, merged, 0, 0.01, Deadline.after(60), None, like).plans
    assert like not in none


def test_a_plan_far_over_the_budget_is_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decide about all of it anew takes as long as to search without it."""
    problem = corpus.load("gpt2_2")
    whole = unmerged(reduce(problem))
    known = expand(problem, whole, keep_all(whole.core)).plan
    asked = problem.with_budget(problem.base_bytes + (known.peak_bytes - problem.base_bytes) * 8 // 10)
    given = asked, merge(whole.core), known, 0.01, Deadline.after(60)
    assert starts.like_known(*given) is None
    monkeypatch.setattr(starts, "NEARBY", None)
    assert starts.like_known(*given) is not None


@pytest.mark.parametrize("is_searched", [True, False])
def test_from_whatever_plan_it_starts_budget_and_bound_hold(
    is_searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exhaustive search knows what is cheapest; what is known fits, or breaks the budget."""
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    monkeypatch.setattr(solver, "best_order", lambda problem, _: problem.graph.backward_steps)

    def through(search: Search, *_: object) -> Found:
        search.is_over = True
        return Found(None, 0, finished=False)

    if not is_searched:
        monkeypatch.setattr(Search, "run", through)
    for asked, least_ns in with_optima(map(random_problem, range(20))):
        for known in (save_all(asked), solve(asked.with_budget(asked.budget_bytes + 1))):
            plan = solve(asked, known=known)
            assert simulate(asked, plan).peak_bytes == plan.peak_bytes <= asked.budget_bytes
            assert plan.bound_ns <= least_ns <= plan.cost_ns


@pytest.mark.slow
def test_a_known_plan_that_fits_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that was chosen had no plan, and the one of what is known was not looked at."""
    problem = corpus.load("vgg16")
    own = problem.graph.backward_steps
    least = needs(problem, orders(problem))
    low = min(least, key=least.__getitem__)
    asked = problem.with_budget(least[own][0] - 1)
    known = solve(asked)
    assert order_of(known, problem) != own and least[low][0] < least[own][0]
    monkeypatch.setattr(solver, "best_order", lambda *_: own)
    with pytest.raises(BudgetError):
        solve(asked)
    found = solve(asked, known=known)
    assert found.peak_bytes <= asked.budget_bytes and found.cost_ns <= known.cost_ns
    with pytest.raises(BudgetError):
        solve(asked, known=STRATEGIES["save_all"](problem, SolveOptions()))


def test_a_plan_of_another_problem_is_an_error() -> None:
    problem = corpus.load("gpt2_2")
    with pytest.raises(PlanError, match="names op 100000"):
        solve(problem, budget_bytes=10**10, known=Plan((), (100_000,)))


def test_the_order_of_a_known_plan_stays_and_others_are_looked_for_if_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round under Inductor begins from a plan: to look at orders again took up to 2 seconds of it."""
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    problem = head(batch=4, weight=100)
    own, best = problem.graph.backward_steps, best_order(problem)
    looked = []
    monkeypatch.setattr(solver, "best_order", lambda problem, _: looked.append(problem) or best)
    found = solve(problem, budget_bytes=116, known=kept(problem, own))
    assert order_of(found, problem) == own and not looked
    found = solve(problem, budget_bytes=109, known=kept(problem, own))
    assert order_of(found, problem) == best and looked


@pytest.mark.parametrize("seed", [1726, 1817, 3093])
def test_a_known_plan_that_does_not_fit_makes_none_dearer(seed: int) -> None:
    """Its order had come first, and what it costs in that was called optimal."""
    problem = random_problem(seed)
    for order in orders(problem)[1:]:
        known = kept(problem, order)
        asked = problem.with_budget(simulate(problem, known).peak_bytes - 1)
        if least := cheapest(asked):
            found = solve(asked, known=known)
            assert found.cost_ns == least.cost_ns


def cheapest(problem: Problem) -> Plan | None:
    try:
        return solve(problem)
    except BudgetError:
        return None
