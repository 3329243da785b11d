"""What each round of `fit` asks the solver for, and from which plan it begins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise

import pytest

from rematc.errors import BudgetError
from rematc.fit import OPEN, fit
from rematc.learn import OpNeed
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate
from rematc.solve import solve
from rematc.solve.clock import spend
from tests import graphs

OPTIONS = SolveOptions(time_limit_s=1)
CHAIN = graphs.each_of_its_kind(graphs.chain(12)).with_budget(9)
WIDE = replace(
    CHAIN, graph=replace(CHAIN.graph, storage_bytes=tuple(100 * n for n in CHAIN.graph.storage_bytes))
).with_budget(900)


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


@pytest.mark.parametrize(("second", "more"), [(950, None), (2000, 100)])
def test_what_would_be_too_much_for_a_plan_that_fits_is_said_of_all_code(
    rounds: Rounds, second: int, more: int | None
) -> None:
    """Or half of that plan's room, if it is more: to be refused took a ViT a third of its first step.

    To look for no other left a BERT with 7 times as dear a plan.
    """

    def over(plan: Plan) -> dict[int, OpNeed]:
        return {18: OpNeed(9900, 9000)} if len(rounds.asked) == 2 else {}

    needs = iter((700, second, 10**6))
    best = fit(WIDE, OPTIONS, lambda plan: next(needs), None, over).plan
    assert best.backward == rounds.found[0].backward
    first, then, last = rounds.asked[:3]
    assert first.costs == then.costs == last.costs
    said = simulate(then, rounds.found[1]).peak_bytes
    assert then.lowering_bytes < 0 < second - said
    assert last.lowering_bytes - then.lowering_bytes == (more or second - said)
    assert simulate(last, best).peak_bytes <= 900 == WIDE.budget_bytes


def test_where_the_code_needs_the_same_again_it_is_said_of_all_code(rounds: Rounds) -> None:
    """What was told of other ops has not helped: a BERT's third round found the plan of its second."""

    def over(plan: Plan) -> dict[int, OpNeed]:
        profile = simulate(WIDE, plan)
        most, step = max(zip(profile.live_bytes, profile.steps, strict=True), key=lambda each: each[0])
        return {step.op: OpNeed(1000, 1000 - most)}

    with suppress(BudgetError):
        fit(WIDE, OPTIONS, lambda plan: 1000, None, over)
    assert [p.lowering_bytes for p in rounds.asked[:3]] == [0, 0, 100]


@pytest.mark.parametrize(
    ("needs", "tried"),
    [((945, 944, 943, 942, 941, 940), 6), ((999, 998, 997, 996, 995, 994), 4), ((945, 944, 943, 944, 9), 4)],
    ids=["nearer", "far", "no nearer"],
)
def test_there_are_more_rounds_where_code_comes_near(
    rounds: Rounds, needs: Sequence[int], tried: int
) -> None:
    """A BERT was refused a budget that one more round would have found a plan for."""
    left = iter(needs)

    def over(plan: Plan) -> dict[int, OpNeed]:
        return {len(rounds.asked): OpNeed(1000, 1)}  # another op each time

    with suppress(BudgetError, StopIteration):
        fit(WIDE, OPTIONS, lambda plan: next(left), None, over)
    told = [p.costs != WIDE.costs or p.lowering_bytes > 0 for p in rounds.asked]
    assert told[1:tried] == [True] * (tried - 1) and not any(told[tried:])


@pytest.mark.parametrize(
    ("far", "asked", "result"), [(100.0, 2, ("feasible", True)), (0.0, 4, ("optimal", False))]
)
def test_where_a_plan_fits_rounds_end_with_the_time_limit_but_for_one_that_is_far_too_dear(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch, far: float, asked: int, result: tuple[str, bool]
) -> None:
    """One half of a compile was solving, for plans that cost as much."""
    monkeypatch.setattr("rematc.fit.FAR", far)
    rounds.takes_all_its_time = True
    needs = iter((700, 710, 720, 730))
    plan = fit(WIDE, SolveOptions(time_limit_s=100), lambda plan: next(needs)).plan
    assert len(rounds.asked) == asked
    assert (plan.status, OPEN in plan.notes) == result  # the room that is left was not told of, or was


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
