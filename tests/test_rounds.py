"""What each round of `fit` asks the solver for, and from which plan it begins."""

from __future__ import annotations

from contextlib import suppress
from itertools import count, pairwise

import pytest

from rematc.errors import BudgetError
from rematc.fit import fit
from rematc.learn import OpNeed
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve import solve
from rematc.solve.clock import spend
from tests import graphs

OPTIONS = SolveOptions(time_limit_s=1)
CHAIN = graphs.each_of_its_kind(graphs.chain(12)).with_budget(9)


class Rounds:
    """The solver, and what was asked of it: problems, the plans to begin from, those found, time limits."""

    def __init__(self) -> None:
        self.asked, self.known, self.limits = list[Problem](), list[Plan | None](), list[float]()
        self.found = list[Plan]()
        self.takes_all_its_time = False

    def __call__(self, problem: Problem, options: SolveOptions, known: Plan | None) -> Plan:
        self.asked.append(problem)
        self.known.append(known)
        self.limits.append(options.time_limit_s or 0.0)
        if self.takes_all_its_time:
            spend(self.limits[-1])
        self.found.append(solve(problem, OPTIONS))
        return self.found[-1]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    rounds = Rounds()
    monkeypatch.setattr("rematc.fit.solve", rounds)
    return rounds


def test_each_round_starts_from_the_plan_of_the_one_before(rounds: Rounds) -> None:
    needs = count(10)  # more each time, and nobody knows where
    with suppress(BudgetError):
        fit(CHAIN, OPTIONS, lambda plan: next(needs))
    assert rounds.known[:2] == [None, rounds.found[0]]


def test_a_round_starts_from_the_plan_that_fits_where_the_one_before_does_not(rounds: Rounds) -> None:
    """A BERT's third round found a dearer plan than its first: it had begun from one that needed too much."""

    def over(plan: Plan) -> dict[int, OpNeed]:
        return {2: OpNeed(12, 1)} if len(rounds.found) == 2 else {}

    needs = iter((7, 10, 10, 10))
    fit(CHAIN, OPTIONS, lambda plan: next(needs), None, over)
    first, second = rounds.found[:2]
    assert first.cost_ns > second.cost_ns
    assert [plan and plan.backward for plan in rounds.known[:3]] == [None, first.backward, first.backward]


def test_where_ops_are_told_to_need_too_much_for_a_plan_that_fits_no_other_is_looked_for(
    rounds: Rounds,
) -> None:
    """To be refused took a ViT 22 seconds, a third of its first step."""

    def over(plan: Plan) -> dict[int, OpNeed]:
        return {18: OpNeed(99, 90)} if len(rounds.asked) == 2 else {}

    needs = iter((7, 10))
    best = fit(CHAIN, OPTIONS, lambda plan: next(needs), None, over).plan
    assert len(rounds.asked) == 2 and best.backward == rounds.found[0].backward


def test_the_last_round_has_less_of_everything_where_ops_need_more_each_time(rounds: Rounds) -> None:
    """What runs at once in Inductor's code depends on the plan: a BERT was left 4 times as dear a plan."""

    def over(plan: Plan) -> dict[int, OpNeed]:
        n = len(rounds.asked)
        return {n: OpNeed(9 + n, 1)}  # another op each time

    with suppress(BudgetError):
        fit(CHAIN, OPTIONS, lambda plan: 10, None, over)
    assert [p.costs == q.costs for p, q in pairwise(rounds.asked[:4])] == [False, False, True]
    assert rounds.asked[3].lowering_bytes > rounds.asked[2].lowering_bytes


def test_a_round_has_part_of_the_time_limit(rounds: Rounds) -> None:
    """All of it for the first, and solving took a third of a compile."""
    rounds.takes_all_its_time = True
    needs = count(10)
    with suppress(BudgetError):
        fit(CHAIN, SolveOptions(time_limit_s=100), lambda plan: next(needs))
    assert rounds.limits[:3] == pytest.approx([70, 40, 40])
