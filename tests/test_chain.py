"""Chains: how a core is cut into segments, what a segment may keep, and the plans of the dynamic program."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from benchmarks import corpus
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import chain as chains
from rematc.solve import choices, solve
from rematc.solve.burst import Burst
from rematc.solve.chain import ChainPlans, chained, plans_of_chains
from rematc.solve.choices import windows_of
from rematc.solve.cutting import chain_of
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.improve import NEAR
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.reduce import reduce
from rematc.solve.segments import Chain
from rematc.solve.starts import first_plans
from tests.graphs import Builder, chain, problems, save_all_peak, skip

NAMES = ("llama8", "mlp", "unet", "t5")


def cut(problem: Problem) -> tuple[Merged, Chain]:
    merged = merge(reduce(problem.with_budget(save_all_peak(problem))))
    found = chain_of(merged.core)
    assert found is not None
    return merged, found


def chain_plans(problem: Problem, merged: Merged) -> ChainPlans | None:
    return next(reversed(plans_of_chains(problem, merged)), None)


@pytest.mark.parametrize("name", NAMES)
def test_segments_part_the_graph_and_read_only_what_they_may(name: str) -> None:
    _, found = cut(corpus.load(name))
    core = found.core
    assert sorted(u for s in found.segments for u in s.units) == list(range(len(core.units)))
    assert [t for s in reversed(found.segments) for t in s.stages] == list(range(len(core.stages)))
    for s, segment in enumerate(found.segments):
        leaves = {b for t in found.segments[s + 1 : s + 2] for b in t.enters}
        own = {b for u in segment.units for b in core.units[u].makes}
        allowed = own | found.always | core.held | segment.enters | leaves
        assert {b for u in segment.units for b in core.units[u].reads} <= allowed
        assert {b for t in segment.stages for b in core.stages[t].reads} <= allowed


def test_a_graph_without_a_backward_pass_is_no_chain() -> None:
    assert chain_of(reduce(corpus.load("rand100_0"))) is None


def conditioned(n: int) -> Problem:
    """``n`` layers that read what is made of a condition, and in backward the condition, too."""
    b = Builder()
    x, c, grad = b.input("x"), b.input("c"), b.tangent("dy")
    (c,) = b.op("embedded", [c], 1)
    (m,) = b.op("silu", [c], 1)
    made = []
    for k in range(n):
        (inner,) = b.op(f"f{k}", [x, m], 8)
        (y,) = b.op(f"g{k}", [inner], 4)
        made.append((inner, y))
        x = y
    loss, grads = b.op("loss", [x], 1), []
    for k, (inner, y) in reversed([*enumerate(made)]):
        (grad,) = b.op(f"dg{k}", [grad, y], 8, phase="backward")
        (grad,) = b.op(f"df{k}", [grad, inner], 4, phase="backward")
        grads += b.op(f"dc{k}", [grad, m], 1, phase="backward")
        (grads[-1],) = b.op(f"dsilu{k}", [grads[-1], c], 1, phase="backward")
    return b.problem(loss, [grad, *grads])


def test_what_each_layer_reads_in_backward_alone_is_kept_and_does_not_end_the_chain() -> None:
    core = reduce(conditioned(12))
    found = chain_of(core)
    assert found is not None
    assert len(found.segments) >= 12
    assert found.needs_bytes <= 3 * (8 + 4)  # three layers of twelve


def test_layers_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    ways = choices._Part.ways

    def look(part: choices._Part) -> list[choices.Way]:
        looked_at.append(part)
        return ways(part)

    monkeypatch.setattr(choices._Part, "ways", look)
    merged, found = cut(corpus.load("llama_16"))
    windows = [window for of_segment in windows_of(merged, found) for window in of_segment]
    assert len(windows) > len(found.segments) > 3 * len(looked_at)


@pytest.mark.parametrize("name", ["llama8", "resnet50"])
def test_every_choice_makes_what_its_stages_read(name: str) -> None:
    merged, found = cut(corpus.load(name))
    core = found.core
    windows = [window for of_segment in windows_of(merged, found) for window in of_segment]
    assert {window.length for window in windows} >= {1, 2}
    for window in windows:
        segment = window.segment
        own = {b for u in segment.units for b in core.units[u].makes} - found.always - core.held
        assert not window.choices[-1].kept
        for choice in window.choices:
            there = set(choice.kept)
            for t, units in zip(segment.stages, choice.runs, strict=True):
                for u in units:
                    assert own.intersection(core.units[u].reads) <= there
                    there.update(core.units[u].makes)
                assert own.intersection(core.stages[t].reads) <= there


def test_where_all_sets_are_tried_no_plain_way_is_cheaper_for_what_it_keeps_and_needs() -> None:
    merged, found = cut(corpus.load("resnet50"))
    compared = 0
    for s, segment in enumerate(found.segments[:-1]):
        part = choices._Part(Burst(merged), found, segment, found.segments[s + 1].enters)
        if len(part.own) <= choices.MOST:
            sets = choices._thinned(part)
            plain = [(kept, part.again(kept, stays)) for stays in (False, True) for kept in sets]
            of_segment = [part.choice(way) for way in part._cheapest(plain)]
            for c in map(part.choice, (plain[0], plain[len(sets) - 1])):  # all sets are tried at their limits
                compared += 1
                assert any(
                    o.again_ns <= c.again_ns and o.kept_bytes <= c.kept_bytes and o.peak_bytes <= c.peak_bytes
                    for o in of_segment
                )
    assert compared


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_window_is_all_of_its_segments(length: int) -> None:
    merged, found = cut(corpus.load("resnet50"))
    windows = windows_of(merged, found)
    assert any(len(of_segment) >= length for of_segment in windows)
    for s, of_segment in enumerate(windows):
        for window in of_segment[length - 1 : length]:
            parts = found.segments[s : s + length]
            assert window.length == length and window.segment.enters == parts[0].enters
            assert sorted(u for part in parts for u in part.units) == list(window.segment.units)
            assert [t for part in reversed(parts) for t in part.stages] == list(window.segment.stages)


def test_no_choice_is_worse_than_another_in_all_respects() -> None:
    merged, found = cut(corpus.load("resnet50"))
    for window in (window for of_segment in windows_of(merged, found) for window in of_segment):
        *others, last = (choices._numbers(c) for c in window.choices)
        assert len({*others}) == len(others)
        for one in others:
            assert not any(
                all(x <= y for x, y in zip(other, one, strict=True))
                for other in (*others, last)
                if other != one
            )


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5])
def test_what_a_plan_costs_is_what_the_table_says_less_nothing_for_forward(share: float) -> None:
    """ResNet-50 is all chain: forward is for nothing, and so is what the last window of a pass would keep."""
    problem = corpus.load("resnet50")
    room = save_all_peak(problem) - problem.base_bytes
    asked = problem.with_budget(problem.base_bytes + int(share * room))
    plans = chain_plans(asked, merge(reduce(asked)))
    assert plans is not None
    level = (int(share * room) - (plans.low - problem.base_bytes)) // plans.unit
    written = plans._at(level)
    assert written is not None and written.plan.cost_ns > 0
    assert written.plan.cost_ns == pytest.approx(float(plans.table[0, -1, level]), rel=1e-4)


@pytest.mark.parametrize(
    ("enters", "most", "unit"), [(100, 10**6, 3125), (7000, 10**6, 3500), (2000, 10**6, 2000)]
)
def test_what_enters_a_segment_is_a_whole_number_of_units(enters: int, most: int, unit: int) -> None:
    """Of 100 segments, for which there are 320 levels: 1000000 bytes in units of 3125 at the least."""
    assert chains._unit(most, [enters] * 100) == unit


@pytest.mark.parametrize("budget", [4, 5, 6, 7])
def test_on_a_uniform_chain_one_block_more_makes_up_for_what_is_rounded(budget: int) -> None:
    problem = chain(12)
    best = solve(problem, SolveOptions(time_limit_s=60, gap=0.0), budget_bytes=budget)
    assert best.bound_ns == best.cost_ns
    roomier = problem.with_budget(budget + 1)
    plans = chain_plans(roomier, unmerged(reduce(roomier)))
    written = plans and plans.written(budget + 1)
    assert written is not None
    assert written.plan.cost_ns <= best.cost_ns


@settings(max_examples=40)
@given(problems(ops=12))
def test_plans_of_a_chain_fit_or_there_is_none(problem: Problem) -> None:
    peak = save_all_peak(problem)
    for share in (0.6, 0.8, 0.95):
        asked = problem.with_budget(int(share * peak))
        plans = chain_plans(asked, merge(reduce(asked)))
        written = plans and plans.written(int(share * peak))
        if written:
            validate(asked, written.plan)


@pytest.mark.parametrize("problem", [chain(40, ns=100), skip(5)], ids=["chain", "skip"])
def test_the_lowest_plan_of_a_chain_is_no_higher_than_what_dropping_finds(problem: Problem) -> None:
    asked = problem.with_budget(save_all_peak(problem))
    merged = merge(reduce(asked))
    plans = chain_plans(asked, merged)
    lowest = plans and plans.lowest()
    assert lowest is not None
    lower = asked.with_budget(lowest.plan.peak_bytes - 1)
    dropped = drop(lower, merge(reduce(lower)))
    assert dropped is None or dropped.plan.cost_ns > 0


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("mlp", 0.15), ("convnext", 0.25))),
        ("mamba", 0.2),
    ],
)
def test_where_budgets_are_tight_a_second_is_enough_for_what_a_chain_costs(name: str, share: float) -> None:
    problem = corpus.load(name)
    peak = solve(problem.with_budget(None)).peak_bytes - problem.resident_bytes
    asked = problem.with_budget(problem.resident_bytes + int(share * peak))
    plans = chain_plans(asked, merge(reduce(asked)))
    written = plans and plans.written(asked.budget_bytes or 0)
    assert written is not None
    found = solve(asked, SolveOptions(time_limit_s=1))  # where one is near the bound no other is looked for
    assert found.cost_ns <= max(NEAR * found.bound_ns, written.plan.cost_ns)


@pytest.mark.slow
def test_where_the_only_plan_is_dear_a_finer_merge_has_a_cheaper_one() -> None:
    """DenseNet at 1.1 times the smallest budget known: with all small blocks saved hardly anything fits."""
    problem = corpus.load("densenet")
    asked = problem.with_budget(problem.base_bytes + 966_000_000)
    merged = merge(reduce(asked), 966_000_000)
    assert asked.budget_bytes is not None
    written = chained(asked, merged)
    assert drop(asked, merged) is None and (written is None or written.plan.cost_ns > 5 * problem.forward_ns)
    found = first_plans(asked, merged, 966_000_000, 0.01, Deadline.after(60)).plans
    assert all(written.plan.peak_bytes <= asked.budget_bytes for written in found)
    assert min(written.plan.cost_ns for written in found) < 1.2 * problem.forward_ns
