"""Where ranks gather what they share as often as a plan likes, it is never kept."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch import fx

from rematc import compat, ranks
from rematc.capture import REGATHERED
from rematc.errors import BudgetError, PlanError
from rematc.options import SolveOptions
from rematc.passes.gathered import groups
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.ranks import agree, tightest
from rematc.regather import shared, without_price
from rematc.simulate import validate
from rematc.solve import solve
from tests import oracle
from tests.graphs import Builder

GATHER = "_c10d_functional.all_gather_into_tensor.default"


def layers(count: int, seed: int, pin: str | None = None) -> Problem:
    """Layers that multiply by a weight which each step gathers anew, of random sizes and times."""
    draw, b = random.Random(seed), Builder()
    x, made = b.input("x"), list[tuple[int, int, int]]()
    for n in range(count):
        (whole,) = b.op(f"gather{n}", [b.input(f"shard{n}")], draw.randint(1, 9), target=GATHER, pin=pin)
        (y,) = b.op(f"f{n}", [x, whole], draw.randint(1, 9), ns=draw.randint(1, 9))
        made.append((whole, x, y))
        x = y
    gradient, gradients = b.tangent("dy", 1), []
    for n, (whole, read, y) in reversed([*enumerate(made)]):
        reads = [gradient, whole, *draw.sample([read, y], draw.randint(1, 2))]
        (gradient, of_weight) = b.op(f"g{n}", reads, draw.randint(1, 9), draw.randint(0, 3), phase="backward")
        gradients.append(of_weight)
    return without_price(b.problem([x], [*gradients, gradient]))


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_keeps_it_and_each_is_the_cheapest(seed: int) -> None:
    problem = layers(2 + seed % 2, seed)
    whole = shared(problem.graph)
    assert len(whole) == 2 + seed % 2
    with pytest.raises(BudgetError) as refused:
        solve(problem, budget_bytes=1)
    smallest, most = refused.value.minimum_bytes, solve(problem).peak_bytes
    assert smallest == oracle.minimum_peak(problem)
    for budget in {smallest, (smallest + most) // 2, most}:
        asked = problem.with_budget(budget)
        plan, best = solve(asked, SolveOptions(gap=0.0)), oracle.search(asked)
        validate(asked, plan)
        assert whole.isdisjoint(plan.saved)
        assert best is not None
        assert plan.cost_ns == best.cost_ns


@pytest.mark.parametrize("seed", range(5))
def test_larger_graphs_keep_none_of_it_either(seed: int) -> None:
    problem = layers(12, seed)
    with pytest.raises(BudgetError) as refused:
        solve(problem, budget_bytes=1)
    smallest, most = refused.value.minimum_bytes, solve(problem).peak_bytes
    for budget in (smallest, (smallest + most) // 2, most):
        asked = problem.with_budget(budget)
        plan = solve(asked)
        validate(asked, plan)
        assert shared(problem.graph).isdisjoint(plan.saved)
        assert plan.bound_ns <= plan.cost_ns


def test_the_budget_is_kept_where_more_is_alive_while_it_is_gathered() -> None:
    """Two halves of 5 bytes are put together: 10 bytes more than if the whole were kept."""
    b = Builder()
    x, shard = b.input("x"), b.input("shard")
    (halves,) = b.op("gather", [shard], 10, target=GATHER)
    (whole,) = b.op("cat", [halves], 10)
    (y,) = b.op("f", [x, whole], 4, ns=3)
    (z,) = b.op("g", [y], 4, ns=3)
    (w,) = b.op("h", [z], 1)
    dy = b.tangent("dy", 1)
    (dz,) = b.op("back", [dy, z, y, whole], 1, phase="backward")
    problem = without_price(b.problem([w], [dz]))
    with pytest.raises(BudgetError) as refused:
        solve(problem, budget_bytes=1)
    assert solve(problem).peak_bytes == 30
    for budget in range(refused.value.minimum_bytes, 31):
        plan = solve(asked := problem.with_budget(budget))
        validate(asked, plan)
        assert {halves, whole}.isdisjoint(plan.saved)


def test_what_may_not_run_again_is_not_shared() -> None:
    assert not shared(layers(3, 0, pin="collective").graph)


# Ranks


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Of two ranks, both here."""
    store = dist.HashStore()
    monkeypatch.setattr(compat, "rank_store", lambda: store)
    return store


def as_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """That has come to no graph yet."""
    for counter in ("_AGREED", "_MET"):
        monkeypatch.setattr(ranks, counter, Counter())


@pytest.mark.usefixtures("store")
def test_ranks_with_different_plans_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Plan(saved=(1,), backward=(3,)), Plan(saved=(), backward=(1, 3))
    as_another_rank(monkeypatch)
    agree(["0"], first)
    agree(["0"], second)
    as_another_rank(monkeypatch)
    agree(["0"], first)
    with pytest.raises(PlanError, match="wait for each other forever"):
        agree(["0"], first)
    agree(["1"], second)  # others, who gather among themselves


@pytest.mark.usefixtures("store")
def test_ranks_plan_for_the_one_with_the_least_room(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store
) -> None:
    """They come to the graph of the same number; where others are in another, they would wait forever."""
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.0)
    as_another_rank(monkeypatch)
    monkeypatch.setattr(compat, "ranks_of", lambda group: (4, [4, 6]))
    problem = replace(layers(2, 0), resident_bytes=5)
    with pytest.raises(PlanError, match=r"2 ranks gather the same parameters .* not all came"):
        tightest(["0"], problem)
    as_another_rank(monkeypatch)
    store.set("rematc/met/0/1/6", "7")
    assert tightest(["0"], problem).resident_bytes == 7
    store.set("rematc/met/0/2/6", "3")
    assert tightest(["0"], problem).resident_bytes == 5
    assert tightest([], problem) == problem


def test_one_process_agrees_with_itself() -> None:
    agree(["0"], Plan(saved=(), backward=()))
    assert tightest(["0"], layers(2, 0)) == layers(2, 0)


def test_the_groups_are_those_that_gather() -> None:
    graph = fx.Graph()
    shard = graph.placeholder("shard")
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    for group in ("7", "3", "7"):
        graph.call_function(gather, (shard, 2, group)).meta[REGATHERED] = True
    graph.call_function(gather, (shard, 2, "9"))
    graph.output(shard)
    assert groups(fx.GraphModule(torch.nn.Module(), graph)) == ["3", "7"]
