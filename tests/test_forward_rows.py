"""Merged units may run apart in the forward pass: bounds hold for plans that do so, too."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

from rematc.errors import BudgetError
from rematc.problem import Problem
from rematc.solve import solve, solver
from rematc.solve.deadline import Deadline
from rematc.solve.expand import expand, keep_all
from rematc.solve.merge import Merged, merge
from rematc.solve.reduce import reduce
from rematc.solve.refine import Refined, refine
from rematc.solve.search import Search, search
from rematc.solve.spans import tightest
from tests import oracle
from tests.graphs import Builder, chain, with_optima
from tests.test_search import solved


def with_others(ops: int) -> tuple[Builder, int]:
    """An input of no bytes, and ``ops`` ops that must run in forward, so that the graph is a large one."""
    b = Builder()
    x = b.input("x")
    for i in range(ops):
        b.op(f"other{i}", [x], pin="mutates", needed="mutates an input")
    return b, x


def later_alone() -> Problem:
    """The best plan runs f2 in forward, and f3, which makes one unit with it and needs more, in backward."""
    b, x = with_others(5)
    (a,) = b.op("f0", [x], 8)
    (c,) = b.op("f1", [a], 1)
    (v,) = b.op("f2", [a, c], 8)
    (r,) = b.op("f3", [v], 1, workspace=3)
    (o,) = b.op("f4", [c, a], 0)
    b.tangent("t", 1, held=True)
    (g,) = b.op("b1", [r, a], 2, phase="backward")
    (h,) = b.op("b2", [g], 2, phase="backward")
    return b.problem([c, o], [h], resident=7)


def read_later() -> Problem:
    """The best plan runs f in forward and g, one unit with it, in backward: so c goes, and u has room."""
    b, x = with_others(4)
    (c,) = b.op("c", [x], 4)
    (v,) = b.op("f", [c], 8, workspace=20)
    (o,) = b.op("u", [x], 0, workspace=22)
    (r,) = b.op("g", [v, c], 8)
    (d,) = b.op("b", [b.tangent("t", 10, held=True), r], 0, phase="backward")
    return b.problem([o], [d])


def forward_beside(seed: int) -> Problem:
    """A random graph; much of its forward pass is there for backward alone."""
    rng = random.Random(seed)
    b, x = with_others(rng.choice([0, 0, 3]))
    made = [x]
    for i in range(rng.randint(4, 7)):
        last = made[-1] if rng.random() < 0.7 else rng.choice(made)
        reads = sorted({last, *rng.sample(made, rng.choice([0, 0, 1]))})
        size, workspace = rng.choice([1, 2, 4, 4, 8, 8]), rng.choice([0, 0, 0, 3, 6])
        made += b.op(f"f{i}", reads, size, ns=rng.choice([1, 2, 5, 20]), workspace=workspace)
    outputs = sorted(rng.sample(made[1:], rng.choice([1, 1, 2])))
    dy = b.tangent("dy", 1, held=rng.random() < 0.7)
    for i in range(rng.randint(2, 4)):
        reads = sorted({dy, *rng.sample(made[1:], rng.choice([0, 1, 1, 2]))})
        size, workspace = rng.choice([0, 1, 1, 2, 3]), rng.choice([0, 0, 2])
        (dy,) = b.op(f"b{i}", reads, size, phase="backward", workspace=workspace)
    return b.problem(outputs, [dy], rng.choice([0, 7]))


@pytest.fixture(autouse=True)
def _as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    monkeypatch.setattr(solver, "best_order", lambda problem, _: problem.graph.backward_steps)


@pytest.mark.parametrize("problem", [later_alone(), read_later()], ids=["later alone", "read later"])
def test_no_bound_is_above_a_plan_that_runs_merged_units_apart(problem: Problem) -> None:
    least = oracle.minimum_peak(problem)
    assert any(len(parts) > 1 for parts in merge(reduce(problem)).parts)
    with pytest.raises(BudgetError) as refused:
        solve(problem, budget_bytes=least - 1)
    assert refused.value.bound_bytes <= least
    for budget in count(least):
        asked = problem.with_budget(budget)
        best, plan = oracle.search(asked), solved(asked)
        assert best is not None
        assert plan is None or plan.bound_ns <= best.cost_ns <= plan.cost_ns
        if plan and plan.cost_ns == 0:
            break


@pytest.mark.parametrize("seeds", [range(start, start + 30) for start in (40, 70, 100, 160)], ids=str)
def test_the_search_knows_when_it_is_no_bound(seeds: range) -> None:
    """Rows that count merged units as one are asked for by some of the graphs; no bound is from those."""
    as_one = merges = 0
    for asked, least_ns in with_optima(map(forward_beside, seeds)):
        merged, refined = merge(reduce(asked)), Refined(tightest(merge(reduce(asked)).core))
        assert search(asked, merged, refined, 0.0, Deadline.after(60)).bound_ns <= least_ns
        as_one += 1
        merges += any(len(parts) > 1 for parts in merged.parts)
    assert as_one and merges > 20


@pytest.mark.parametrize("budget_bytes", [32, 33])
def test_what_was_merged_is_told_apart_where_rows_of_it_say_nothing_of_all_plans(budget_bytes: int) -> None:
    """The cheapest plan was there, but its bound was 0: merged units were counted as if they ran as one."""
    asked = read_later().with_budget(budget_bytes)
    best, plan = oracle.search(asked), solve(asked)
    assert best is not None and plan.bound_ns == plan.cost_ns == best.cost_ns
    assert plan.status == "optimal"


@pytest.mark.parametrize("seed", [76, 192, 237])
def test_where_nothing_was_merged_nothing_is_searched_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []

    def counting(problem: Problem, merged: Merged, *args: Any) -> Search:
        searches.append(len(merged.core.units))
        return Search(problem, merged, *args)

    monkeypatch.setattr(solver, "Search", counting)
    for asked, _ in with_optima([forward_beside(seed)]):
        searches.clear()
        solved(asked)
        assert len(searches) == len(set(searches))


def test_a_second_search_begins_with_the_bound_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[int] = []

    def noting(*args: Any) -> Search:
        known.append(args[-1])
        return Search(*args)

    monkeypatch.setattr(solver, "Search", noting)
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    for asked, _ in with_optima([forward_beside(198)]):
        if asked.budget_bytes == 26:
            solved(asked)
    assert known == [0, 20]


def test_no_row_is_asked_for_that_says_nothing_more() -> None:
    """Small blocks, which no row counts, can break the budget in forward: that is no reason to bound less."""
    problem = chain(12)
    merged = merge(reduce(problem))
    assert not merged.apart
    refined, written = Refined(tightest(merged.core)), expand(problem, merged, keep_all(merged.core))
    asked = problem.with_budget(problem.base_bytes + 5)
    assert refine(asked, merged, refined, written) and refined.forward
    while refine(asked, merged, refined, written):
        pass
    assert not refined.as_one
