"""A sum of something from each layer, or all of it side by side: kept, the rest is a chain.

WaveNets are made so, and what is unrolled.
"""

from __future__ import annotations

import math
import random

import pytest

from rematc.problem import Problem
from rematc.solve.chain import chained
from rematc.solve.cutting import _collected, chain_of
from rematc.solve.drop import drop
from rematc.solve.merge import merge
from rematc.solve.reduce import reduce
from tests.graphs import Builder, save_all_peak
from tests.test_chain import chain_plans
from tests.test_prefix import compared


def summed(n: int, rng: random.Random | None = None, inner: int = 1) -> Problem:
    """``n`` layers: ops that backward reads, what goes on to the next layer, and a sum of all, read last.

    Of random sizes and times with ``rng``; without it all is of 4 bytes and 10 ns.
    """

    def size() -> int:
        return rng.randint(1, 5) if rng else 4

    def ns() -> int:
        return rng.randint(1, 9) if rng else 10

    b = Builder()
    x, total, made = b.input("x"), None, list[list[int]]()
    for k in range(n):
        parts = [x]
        for i in range(inner):
            parts += b.op(f"f{k}.{i}", parts[-1:], size(), ns=ns())
        made.append(parts)
        (x,) = b.op(f"x{k}", [parts[0], parts[-1]], size(), ns=ns())
        (total,) = b.op(f"t{k}", [total, parts[-1]] if total else parts[-1:], size(), ns=ns())
    assert total is not None
    loss = b.op("loss", [total], 1, ns=0)
    (grad,) = b.op("b", [b.tangent("dy", 1), total], 1, phase="backward")
    for parts in reversed(made):
        (grad,) = b.op(f"b{len(b.ops)}", [grad, *parts], 1, phase="backward")
    return b.problem(loss, [grad])


def test_the_sum_is_kept_and_its_parts_cross_no_cut() -> None:
    core = reduce(summed(8, inner=2))
    found = chain_of(core)
    assert found is not None
    (kept,) = found.always
    assert kept in core.stages[0].reads and len(found.segments) >= 8
    inside = {u for segment in found.segments for u in segment.units}
    outside = {u for u in range(len(core.units)) if u not in inside}
    assert sum(any(core.readers[b] or b == kept for b in core.units[u].makes) for u in outside) == 8  # sums
    for u in outside:
        for b in core.units[u].makes:
            assert b == kept or {*core.readers[b]} <= outside
    for t, stage in enumerate(core.stages):
        own = [s for s in found.segments if t in s.stages]
        there = {b for s in own for u in s.units for b in core.units[u].makes}
        entering = {b for s in found.segments for b in s.enters}
        assert {*stage.reads} <= there | entering | found.always | core.held


@pytest.mark.parametrize(("n", "inner", "many"), [(3, 1, 12), (2, 2, 6)])
def test_no_plan_costs_less_than_the_bound(n: int, inner: int, many: int) -> None:
    """The sum is there for nothing, and who makes it is in no segment: exhaustive search knows of all."""
    rng = random.Random(n)
    dear, exact = compared(summed(n, rng, inner) for _ in range(many))
    assert dear > many and exact > 0


def gated(n: int) -> Problem:
    """``n`` layers of a WaveNet: two convolutions of one input, their product, and what that adds to all."""
    b = Builder()
    x, total, made = b.input("x"), None, list[tuple[int, ...]]()
    for k in range(n):
        (a,), (g,) = b.op(f"filter{k}", [x], 4, ns=40), b.op(f"gate{k}", [x], 4, ns=40)
        (a,), (g,) = b.op(f"tanh{k}", [a], 4, ns=10), b.op(f"sigmoid{k}", [g], 4, ns=10)
        (y,) = b.op(f"mul{k}", [a, g], 4, ns=3)
        (z,) = b.op(f"skip{k}", [y], 4, ns=15)
        made.append((x, a, g, y))
        (x,) = b.op(f"x{k}", [x, z], 4, ns=3)
        (total,) = b.op(f"t{k}", [total, z] if total else [z], 4, ns=3)
    assert total is not None
    loss = b.op("loss", [total], 1, ns=0)
    (top,) = b.op("b", [b.tangent("dy", 1), total], 4, phase="backward")
    grad = top
    for x, a, g, y in reversed(made):
        (dz,) = b.op(f"b{len(b.ops)}", [grad, top], 4, phase="backward")
        (dy,) = b.op(f"b{len(b.ops)}", [dz, y], 4, phase="backward")
        (da,) = b.op(f"b{len(b.ops)}", [dy, a, g], 4, phase="backward")
        (dg,) = b.op(f"b{len(b.ops)}", [dy, a, g], 4, phase="backward")
        (dx,) = b.op(f"b{len(b.ops)}", [da, x], 4, phase="backward")
        (grad,) = b.op(f"b{len(b.ops)}", [grad, dg, dx, x], 4, phase="backward")
    return b.problem(loss, [grad])


def compare_with_dropping(problem: Problem, share: float) -> tuple[float, float]:
    """What a chain's plan costs at a share of the peak, and what one by dropping does, in forward passes."""
    forward_ns = sum(problem.costs[i].runtime_ns for i in problem.graph.forward)
    asked = problem.with_budget(int(share * save_all_peak(problem)))
    merged = merge(reduce(asked))
    plans, dropped = chain_plans(asked, merged), drop(asked, merged)
    written = plans and plans.written(int(share * save_all_peak(problem)))
    assert written
    return written.plan.cost_ns / forward_ns, dropped.plan.cost_ns / forward_ns if dropped else math.inf


@pytest.mark.parametrize(("n", "share"), [(10, 0.3), (16, 0.3), (16, 0.4)])
def test_a_deep_one_has_a_plan_from_its_chain(n: int, share: float) -> None:
    """No chain was found, and dropping, at 25 to 40 times the forward pass, was all there was."""
    chained, dropped = compare_with_dropping(gated(n), share)
    assert chained < 1 and dropped > 10


def unrolled(n: int) -> Problem:
    """``n`` steps of which each puts out what goes on to the next: side by side, twice that is read first."""
    b = Builder()
    h, steps = b.input("h"), list[list[int]]()
    for k in range(n):
        (a,) = b.op(f"a{k}", [h], 12, ns=100)
        (g,) = b.op(f"g{k}", [a], 12, ns=100)
        (h,) = b.op(f"h{k}", [g, h], 4, ns=10)
        steps.append([a, g, h])
    (all_,) = b.op("cat", [h for *_, h in steps], 4 * n, ns=20)
    loss = b.op("square", [all_], 4 * n, ns=20)
    loss = b.op("mean", loss, 1)
    (twice,) = b.op("twice", [all_], 4 * n, ns=20)
    (grads,) = b.op("dsquare", [b.tangent("dy", 1), twice], 4 * n, phase="backward")
    grad = grads
    for k, (a, g, _) in reversed([*enumerate(steps)]):
        before = [steps[k - 1][2]] if k else []
        (dg,) = b.op(f"dh{k}", [grad, grads, g], 4, phase="backward")
        (grad,) = b.op(f"dg{k}", [dg, a, *before], 4, phase="backward")
    return b.problem(loss, [grad])


@pytest.mark.slow
def test_no_plan_for_what_is_unrolled_costs_less_than_the_bound() -> None:
    dear, _ = compared(unrolled(n) for n in (2, 3))
    assert dear > 1


def test_what_collects_outputs_is_followed_once_however_many_ways_lead_on() -> None:
    """Through 60 layers of two branches each, none of which backward reads, lead 2^60 ways."""
    b = Builder()
    h, outputs = b.input("h"), list[int]()
    for k in range(8):
        (h,) = b.op(f"h{k}", [h], 4)
        outputs.append(h)
    x = b.op("cat", outputs, 8)
    for k in range(60):
        left, right = b.op(f"l{k}", x, 4), b.op(f"r{k}", x, 4)
        x = b.op(f"s{k}", [*left, *right], 8)
    loss = b.op("loss", x, 1)
    grads = b.op("dx", [b.tangent("dy"), *x], 4, phase="backward")
    for h in reversed(outputs):
        grads += b.op(f"b{h}", [grads[-1], h], 4, phase="backward")
    core = reduce(b.problem(loss, grads))
    assert _collected(core, [*range(len(core.units))], 1) == {core.stages[0].reads[0]}


def test_what_is_made_of_each_steps_output_is_kept_in_place_of_the_outputs() -> None:
    problem = unrolled(20)
    core = reduce(problem)
    found = chain_of(core)
    assert found is not None
    (kept,) = found.always
    assert core.block_bytes[kept] == 80 and len(found.segments) >= 20
    asked = problem.with_budget(problem.base_bytes + 3 * 80 + 40)  # what is read first takes 240 and more
    written = chained(asked, merge(reduce(asked)))
    assert written and written.plan.peak_bytes <= asked.budget_bytes
    assert written.plan.cost_ns < 1.5 * sum(problem.costs[i].runtime_ns for i in problem.graph.forward)
