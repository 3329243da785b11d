"""Chains for tight budgets: what is read far from its segment is lent, or is cut less finely."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from benchmarks import corpus
from rematc.options import Options
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import cutting
from rematc.solve.chain import ChainPlans, chained, plans_of_chains
from rematc.solve.cutting import chains_of, single_chain_of
from rematc.solve.merge import merge
from rematc.solve.reduce import Core, reduce
from rematc.solve.segments import Chain
from rematc.trace import plan_model
from tests.graphs import Builder, problems, save_all_peak


def lending(core: Core) -> list[Chain]:
    """The chains of ``core`` that lend something."""
    ways = cutting._ways(core, cutting._order(core), 1, lends=True)
    return [chain for chains in ways for chain in chains if chain.lent]


def pyramid(n: int, inner: int = 4) -> Problem:
    """``n`` features, each half as large as the one before and made of it by some ops; a way back down reads
    them all once more.

    Its backward comes first, and reads each feature; that of the features reads what they are made of. The
    largest is read once more by then.
    """
    b = Builder()
    x, grad, features, made = b.input("x"), b.tangent("dy"), list[int](), list[tuple[int, int, int]]()
    for k in range(n):
        size = 2 ** (n - k)
        for i in range(inner):
            (y,) = b.op(f"f{k}.{i}", [x], size, ns=100)
            made.append((x, y, size))
            x = y
        features.append(x)
    for k, feature in reversed([*enumerate(features)]):
        (x,) = b.op(f"down{k}", [x, feature], 1, ns=10)
    loss, sides = b.op("loss", [x], 1), list[int]()
    for k, feature in enumerate(features):
        grad, side = b.op(f"ddown{k}", [grad, feature], 1, 0, phase="backward")
        sides.append(side)
    for x, y, size in reversed(made):
        (grad,) = b.op(f"b{len(b.ops)}", [grad, x, y, *sides], 2 * size, phase="backward")
        if x == features[n // 2]:  # another read of the largest, after all others but its own segment's
            sides = b.op("late", [grad, features[0]], 0, phase="backward")
    return b.problem(loss, [grad])


CORES = [merge(reduce(corpus.load("unet"))).core, reduce(pyramid(8))]


@pytest.mark.parametrize("core", CORES, ids=["unet", "pyramid"])
def test_what_is_lent_is_there_for_all_that_read_it_from_afar_and_for_no_one_after(core: Core) -> None:
    found = lending(core)
    assert found
    for chain in found:
        assert chain.always.isdisjoint(b for b, _ in chain.lent)
        for s, segment in enumerate(chain.segments):
            leaves = {b for later in chain.segments[s + 1 : s + 2] for b in later.enters}
            made = {b for u in segment.units for b in core.units[u].makes}
            own = made | core.held | segment.enters | leaves
            for t in segment.stages:
                allowed = own | chain.there(t)
                assert allowed.issuperset(core.stages[t].reads)
                assert all(allowed.issuperset(core.units[u].reads) for u in segment.units)
            there = {b for b, until in chain.lent if until >= segment.stages.start}
            assert there.isdisjoint(made | segment.enters)


@pytest.mark.parametrize("core", CORES, ids=["unet", "pyramid"])
@pytest.mark.parametrize("budget_bytes", [1, 10**18])
def test_bounds_are_never_of_a_chain_that_lends(core: Core, budget_bytes: int) -> None:
    """`prefix` bounds what a plan costs that may keep such a block to the end, too."""
    chain = single_chain_of(core, budget_bytes)
    assert chain is None or not chain.lent


@pytest.mark.parametrize("n", [6, 12])
def test_what_is_lent_counts_until_the_last_far_read_and_a_plan_keeps_it_no_longer(n: int) -> None:
    core = reduce(pyramid(n))
    for chain in lending(core):
        kept = chain.always_bytes
        assert kept[0] == chain.kept_bytes
        assert kept[-1] <= sum(core.block_bytes[b] for b in chain.always)
        assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("n", [6, 8])
def test_where_the_largest_feature_is_read_far_away_it_is_not_there_while_it_is_made_again(n: int) -> None:
    problem = pyramid(n)
    asked = problem.with_budget(save_all_peak(problem))
    merged = merge(reduce(asked))
    plans = [plan for plan in plans_of_chains(asked, merged) if not plan.chain.lent]
    kept = [low.plan for plan in plans if (low := plan.lowest())]
    lent = [ChainPlans(asked, merged, chain).lowest() for chain in lending(merged.core)]
    lowest = min((low for low in lent if low), key=lambda low: low.plan.peak_bytes)
    validate(asked, lowest.plan)
    assert kept and lowest.plan.peak_bytes < 0.9 * min(plan.peak_bytes for plan in kept)
    asked = problem.with_budget(lowest.plan.peak_bytes)
    written = chained(asked, merged)
    assert written is not None and written.plan.peak_bytes <= lowest.plan.peak_bytes
    assert written.plan.cost_ns < 2 * problem.forward_ns


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_plan_that_lends_takes_no_more_than_the_table_says(every: int) -> None:
    """However deep it is nested: what is lent is made again after that, as anything else."""
    problem = pyramid(4, inner=24)
    asked = problem.with_budget(save_all_peak(problem))
    merged = merge(reduce(asked))
    compared = 0
    for chain in lending(merged.core):
        plans = ChainPlans(asked, merged, chain)
        for level in range(0, plans.levels, every):
            if (found := plans._at(level)) is not None:
                compared += found.plan.cost_ns > problem.forward_ns
                assert found.plan.peak_bytes <= plans.low + level * plans.unit
    assert compared


@given(problems())
@settings(max_examples=80)
def test_plans_that_lend_are_valid_in_whatever_graph(problem: Problem) -> None:
    """Segments taken as one, too, of which one lends to the next."""
    asked = problem.with_budget(save_all_peak(problem))
    merged = merge(reduce(asked))
    for chain in lending(merged.core) if merged.core.has_forward else ():
        if written := ChainPlans(asked, merged, chain).lowest():
            validate(asked, written.plan)


def layered(n: int) -> Problem:
    """``n`` layers of several ops with a way around: cut between those, all ways around are kept."""
    b = Builder()
    x, grad, made = b.input("x"), b.tangent("dy"), []
    for k in range(n):
        y = x
        for i in range(9):
            (z,) = b.op(f"f{k}.{i}", [y], 4, ns=100)
            made.append((y, z))
            y = z
        (x,) = b.op(f"x{k}", [x, y], 4, ns=10)
    loss = b.op("loss", [x], 1)
    for y, z in reversed(made):
        (grad,) = b.op(f"b{len(b.ops)}", [grad, y, z], 4, phase="backward")
    return b.problem(loss, [grad])


def test_where_what_is_always_kept_leaves_no_room_a_coarser_chain_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = layered(4)
    core = merge(reduce(problem)).core
    (roomy,) = chains_of(core)
    tight = chains_of(core, problem.base_bytes + roomy.lowest_bytes)
    assert tight[0] == roomy
    assert tight[-1].lowest_bytes < 0.75 * roomy.lowest_bytes
    monkeypatch.setattr(cutting, "LARGE", tight[-1].largest - 1)  # too large to look at all that it may keep
    assert tight[-1] not in chains_of(core, problem.base_bytes + roomy.lowest_bytes)


class Pyramid(nn.Module):
    """Features of a small network, added up on a way back down, dropout in both."""

    def __init__(self, width: int = 24, depth: int = 6) -> None:
        super().__init__()
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU()
            )
            for _ in range(depth)
        )
        self.side = nn.ModuleList(nn.Linear(width, 2) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers for each row."""
        features = []
        for layer in self.up:
            x = layer(x)
            features.append(x)
        y = x.new_zeros(())
        for side, feature in reversed([*zip(self.side, features, strict=True)]):
            y = F.dropout(torch.tanh(y + side(feature)), 0.1, self.training)
        return y


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_plan_that_lends_keeps_the_budget_and_gradients_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Pyramid(), torch.randn(256, 24)
    problem, kept = plan_model(model, x, mean_square, Options(None, "eager"))
    taken = list[Plan]()

    def lent_alone(asked: Problem, *_: object) -> Plan:
        merged = merge(reduce(asked))
        (first, *_) = lending(merged.core)
        written = ChainPlans(asked, merged, first).written(asked.budget_bytes or 0)
        assert written
        taken.append(written.plan)
        return written.plan

    monkeypatch.setattr(importlib.import_module("rematc.partition"), "solve", lent_alone)
    floor = problem.resident_bytes
    budget = floor + int(0.6 * (kept.peak_bytes - floor))
    found = rematc.verify(model, x, budget, mean_square, inner="eager")
    assert [plan.cost_ns > 0 for plan in taken] == [True]
    assert found.measured_bytes == found.predicted_bytes <= budget
    assert found.difference == 0.0
