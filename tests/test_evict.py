"""General graphs in little room: plans within the budget, also where dropping finds none."""

from __future__ import annotations

import math

import pytest

from benchmarks import corpus
from rematc.exchange import from_networkx
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.simulate import simulate, validate
from rematc.solve import solve
from rematc.solve.clock import counted
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.evict import evict
from rematc.solve.merge import unmerged
from rematc.solve.reduce import reduce
from tests import oracle
from tests.dags import random_dag
from tests.graphs import chain

NEVER = Deadline(math.inf)


@pytest.mark.parametrize("seed", range(60))
def test_what_it_finds_is_within_the_budget_and_no_cheaper_than_the_cheapest(seed: int) -> None:
    problem = from_networkx(random_dag(seed))
    merged, most, least = unmerged(reduce(problem)), solve(problem).peak_bytes, oracle.minimum_peak(problem)
    for budget in {least, (least + most) // 2, most}:
        asked = problem.with_budget(budget)
        written = evict(asked, merged, NEVER)
        if written is None:
            assert budget < most
            continue
        validate(asked, written.plan)
        best = oracle.search(asked)
        assert best is not None
        assert best.cost_ns <= written.plan.cost_ns
        assert (written.plan.cost_ns == 0) >= (budget == most)


def test_it_finds_most_of_the_smallest_budgets_of_small_graphs() -> None:
    found = 0
    for seed in range(60):
        problem = from_networkx(random_dag(seed))
        least = oracle.minimum_peak(problem)
        found += evict(problem.with_budget(least), unmerged(reduce(problem)), NEVER) is not None
    assert found >= 45


def test_a_budget_that_dropping_does_not_meet_is_kept() -> None:
    problem = large()
    asked = problem.with_budget(int(0.8 * simulate(problem, solve(problem)).peak_bytes))
    merged = unmerged(reduce(asked))
    assert drop(asked, merged) is None
    written = evict(asked, merged, NEVER)
    assert written is not None
    plan = solve(asked, SolveOptions(time_limit_s=5.0))
    validate(asked, plan)
    assert plan.peak_bytes <= asked.budget_bytes
    assert plan.cost_ns <= written.plan.cost_ns


def large() -> Problem:
    return corpus.load("rand100_1")


def test_it_ends_when_it_is_time() -> None:
    problem = large().with_budget(large().base_bytes + 40_000)
    assert evict(problem, unmerged(reduce(problem)), Deadline(-math.inf)) is None


def test_it_counts_all_that_it_looks_at() -> None:
    """To say what is cheapest to make again takes far longer than to make it: a second was half a minute."""
    problem = corpus.load("rand250_0")
    asked = problem.with_budget(int(0.8 * simulate(problem, solve(problem)).peak_bytes))
    merged = unmerged(reduce(asked))
    with counted() as clock:
        evict(asked, merged, Deadline.after(0.5))
        assert 0.5 <= clock.done < 0.6


def test_graphs_with_a_backward_pass_are_not_for_it() -> None:
    problem = chain(8).with_budget(7)
    assert evict(problem, unmerged(reduce(problem)), NEVER) is None
