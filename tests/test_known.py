"""A plan that is known: to start from where the search finds no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import corpus
from rematc.baselines import STRATEGIES
from rematc.errors import BudgetError, PlanError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.solve import solve, solver
from rematc.solve.drop import drop
from rematc.solve.expand import expand, keep_all, written_again
from rematc.solve.merge import merge, unmerged
from rematc.solve.order import orders, reordered, restored, said_of_reordered
from rematc.solve.reduce import reduce


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


def test_a_plan_of_another_problem_is_an_error() -> None:
    problem = corpus.load("gpt2_2")
    with pytest.raises(PlanError, match="names op 100000"):
        solve(problem, budget_bytes=10**10, known=Plan((), (100_000,)))
