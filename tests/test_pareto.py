"""The trade-off curve: every plan on it is valid, none is beaten by another, and its bounds hold."""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

import rematc
from rematc.errors import BudgetError, OptionError, PlanError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged, validate
from tests import oracle
from tests.graphs import chain, problems, skip

# rematc.pareto is the function; its room is found by its full name alone.
room = importlib.import_module("rematc.pareto")

CHAIN = chain(5)
SMALL = Plan((3, 4), (5, 6, 0, 1, 7, 0, 8, 9))  # peaks at 4 and costs 3
DEAR = Plan((3, 4), (5, 6, 0, 1, 7, 8, 9))  # 5 and 2
FAIR = Plan((2, 3, 4), (5, 6, 7, 0, 8, 9))  # 5 and 1


def check_curve(problem: Problem, plans: tuple[Plan, ...]) -> None:
    """Each plan is valid at its budget, the budgets rise, and neither costs nor bounds do."""
    for plan in plans:
        validate(problem.with_budget(plan.budget_bytes), plan)
    budgets = [room._room(plan.budget_bytes) for plan in plans]
    assert budgets == sorted(set(budgets))
    for numbers in ([plan.cost_ns for plan in plans], [plan.bound_ns for plan in plans]):
        assert numbers == sorted(numbers, reverse=True)


def test_a_chain_from_the_smallest_budget_to_where_nothing_is_recomputed() -> None:
    plans = rematc.pareto(chain(4))
    assert [(p.budget_bytes, p.peak_bytes, p.cost_ns, p.status) for p in plans] == [
        (4, 4, 1, "optimal"),
        (5, 5, 0, "optimal"),
    ]


def test_given_budgets_are_sorted_and_those_that_cannot_be_met_left_out() -> None:
    problem = skip(3)
    plans = rematc.pareto(problem, [None, "0.051kB", 47, 49, "48 B", 49, "1GB"])
    assert [(p.budget_bytes, p.cost_ns) for p in plans] == [(48, 4), (49, 2), (51, 0), (10**9, 0), (None, 0)]
    check_curve(problem, plans)
    assert rematc.pareto(problem, [1, "47B"]) == rematc.pareto(problem, []) == ()


def test_the_problem_s_own_budget_plays_no_part() -> None:
    def curve(problem: Problem) -> list[tuple[int | None, int]]:
        return [(p.budget_bytes, p.cost_ns) for p in rematc.pareto(problem)]

    assert curve(chain(4).with_budget(1)) == curve(chain(4))


def test_budgets_are_spread_evenly_above_what_is_resident() -> None:
    problem = replace(skip(4), resident_bytes=1000)
    plans = rematc.pareto(problem, points=4)
    low, high = plans[0].budget_bytes, plans[-1].budget_bytes
    assert low is not None and high is not None
    assert low == 1000 + (rematc.pareto(skip(4), points=2)[0].budget_bytes or 0)
    assert [p.budget_bytes for p in plans] == [low + (high - low) * i // 3 for i in range(4)]
    assert plans[-1].cost_ns == 0 < plans[0].cost_ns
    with pytest.raises(BudgetError):
        rematc.solve(problem.with_budget(low - 1))


@settings(max_examples=12)
@given(problems())
def test_each_plan_of_a_random_curve_is_the_cheapest(problem: Problem) -> None:
    plans = rematc.pareto(problem, points=4)
    check_curve(problem, plans)
    assert plans
    for plan in plans:
        best = oracle.search(problem.with_budget(plan.budget_bytes))
        assert best is not None
        assert plan.bound_ns <= best.cost_ns == plan.cost_ns


# --- with a search that is told what to find


def searching(monkeypatch: pytest.MonkeyPatch, found: dict[int, Plan]) -> None:
    """Let `solve` find these plans, with these bounds, at these budgets, and none at any other."""

    def solve(problem: Problem, options: SolveOptions) -> Plan:
        budget = problem.budget_bytes
        if budget not in found:
            raise BudgetError(budget or 0, 4, step="b5", largest=())
        return replace(judged(problem, found[budget]), bound_ns=found[budget].bound_ns)

    monkeypatch.setattr(room, "solve", solve)


def curve(plans: tuple[Plan, ...]) -> list[tuple[int | None, int, int]]:
    return [(p.budget_bytes, p.peak_bytes, p.cost_ns) for p in plans]


def test_a_cheaper_plan_from_a_smaller_budget_is_used_at_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searching(monkeypatch, {5: FAIR, 6: DEAR})
    plans = rematc.pareto(CHAIN, [5, 6, 7])
    assert curve(plans) == [(5, 5, 1), (6, 5, 1), (7, 5, 1)]
    assert [len(p.notes) for p in plans] == [0, 1, 1]
    assert "found under a budget of 5 bytes" in plans[1].notes[0]
    check_curve(CHAIN, plans)


def test_a_cheaper_plan_from_a_larger_budget_is_used_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    searching(monkeypatch, {5: SMALL, 6: FAIR})
    assert curve(rematc.pareto(CHAIN, [3, 4, 5, 6])) == [(4, 4, 3), (5, 5, 1), (6, 5, 1)]


def test_a_tie_goes_to_the_plan_found_at_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    searching(monkeypatch, {5: FAIR, 6: FAIR})
    assert [p.notes for p in rematc.pareto(CHAIN, [5, 6])] == [(), ()]


def test_a_bound_holds_at_smaller_budgets_and_not_at_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = replace(DEAR, bound_ns=1, status="feasible")
    searching(monkeypatch, {5: replace(FAIR, status="feasible"), 6: dear, 7: replace(FAIR, status="optimal")})
    plans = rematc.pareto(CHAIN, [5, 6, 7])
    assert [(p.cost_ns, p.bound_ns, p.status) for p in plans] == [
        (1, 1, "optimal"),
        (1, 1, "optimal"),
        (1, 0, "feasible"),
    ]


def test_a_bound_that_another_search_refutes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    searching(monkeypatch, {5: FAIR, 6: replace(DEAR, bound_ns=2)})
    with pytest.raises(
        PlanError, match="one search proved that no plan under a budget of 5 bytes costs less"
    ):
        rematc.pareto(CHAIN, [5, 6])


# --- what is refused


@pytest.mark.parametrize("points", [1, 0, -3])
def test_a_curve_needs_two_points(points: int) -> None:
    with pytest.raises(OptionError, match=f"points={points}: give at least 2"):
        rematc.pareto(CHAIN, points=points)


def test_a_budget_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(OptionError, match="'lots'"):
        rematc.pareto(CHAIN, [10, "lots"])


def test_the_examples_on_the_page_of_problems_run() -> None:
    page = (Path(__file__).parents[1] / "docs" / "problem.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    examples = doctest.DocTestParser().get_doctest("".join(blocks), {}, "problem.md", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(examples).failed == 0
