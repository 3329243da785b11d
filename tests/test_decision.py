"""What the first rank decides the others take over, and nobody waits for a rank that decides nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch.distributed as dist

from rematc import compat, ranks
from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import OpCost, Problem
from rematc.ranks import decision
from rematc.solve import solve
from tests.graphs import chain

OPTIONS = SolveOptions()
PROBLEM = chain(8).with_budget(7)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Of two ranks, both here."""
    store = dist.HashStore()
    monkeypatch.setattr(compat, "rank_store", lambda: store)
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.0)
    return store


def slower(problem: Problem) -> Problem:
    """As another rank measured it."""
    costs = (OpCost(cost.runtime_ns + 3, cost.workspace_bytes) for cost in problem.costs)
    return replace(problem, costs=tuple(costs))


def decide(problem: Problem, what: str = "plan") -> Plan:
    with decision(problem, OPTIONS, what) as decided:
        assert decided.plans == ()
        decided.plans = (solve(decided.problem, OPTIONS),)
    return decided.plans[0]


def test_the_others_take_over_times_and_plan() -> None:
    plan = decide(PROBLEM)
    with decision(slower(PROBLEM), OPTIONS) as decided:
        assert decided.problem == PROBLEM
        (taken,) = decided.plans
        assert replace(taken, budget_bytes=None) == replace(plan, budget_bytes=None)


@pytest.mark.parametrize("other", [PROBLEM.with_budget(8), replace(PROBLEM, resident_bytes=1), chain(9)])
def test_who_has_another_problem_decides_for_itself(other: Problem) -> None:
    decide(PROBLEM)
    decide(other)


def test_other_questions_about_a_problem_are_decided_apart() -> None:
    decide(PROBLEM)
    decide(PROBLEM, "choices")


def test_an_error_of_the_first_is_met_by_the_others_too() -> None:
    impossible = PROBLEM.with_budget(1)
    for problem in (impossible, slower(impossible)):
        with pytest.raises(BudgetError):
            decide(problem)


def test_of_a_rank_that_died_nothing_is_heard(caplog: pytest.LogCaptureFixture, store: dist.Store) -> None:
    ours = ranks._key(PROBLEM, OPTIONS, "plan")
    store.add(f"{ours}/ranks", 1)
    decide(PROBLEM)
    assert "nothing was heard" in caplog.text and "each plans by itself" in caplog.text


def test_a_store_that_fails_stops_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise dist.DistNetworkError("the connection is closed")

    monkeypatch.setattr(compat, "rank_store", Gone)
    decide(PROBLEM)
    assert "the connection is closed" in caplog.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "can't be read as JSON"),
        ('{"format": "rematc.plan/1"}', "its format is"),
        ('{"format": "rematc.decision/1", "digest": "", "runtime_ns": [1], "plans": []}', "1 times for"),
    ],
)
def test_what_is_not_a_decision_is_not_taken_over(
    text: str, why: str, caplog: pytest.LogCaptureFixture, store: dist.Store
) -> None:
    decide(PROBLEM)
    store.set(ranks._key(PROBLEM, OPTIONS, "plan"), text)
    decide(PROBLEM)
    assert why in caplog.text


def test_a_decision_for_another_graph_is_not_taken_over(
    caplog: pytest.LogCaptureFixture, store: dist.Store
) -> None:
    decide(PROBLEM)
    other = slower(PROBLEM)
    told = ranks._told(ranks.Decision(replace(other, resident_bytes=2), (decide(other.with_budget(9)),)))
    store.set(ranks._key(PROBLEM, OPTIONS, "plan"), told)
    decide(PROBLEM)
    assert "and this is" in caplog.text


def test_alone_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compat, "rank_store", lambda: None)
    with caplog.at_level(logging.DEBUG):
        decide(PROBLEM)
        decide(PROBLEM)
    assert "rank" not in caplog.text
