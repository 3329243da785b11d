"""The end of the backward pass told exactly: against Dijkstra's algorithm, all plans, and the MILP."""

from __future__ import annotations

import gzip
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode, encode
from rematc.solve.expand import expand
from rematc.solve.improve import Improver, Starts
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.reduce import Core, Stage, Unit, reduce
from rematc.solve.refine import Refined, build, refine
from rematc.solve.search import search
from rematc.solve.spans import Spans, every_stage, tightest
from rematc.solve.tail import Tail, find_tail
from rematc.solve.within import Point, Run
from tests.graphs import Builder, chain, random_problem, save_all_peak, with_optima
from tests.test_merge import in_groups
from tests.test_within import least_ns

MANY = 10**6
RESNET = Path(__file__).parents[1] / "benchmarks" / "problems" / "resnet50.json.gz"


def tail_of(problem: Problem, merged: Merged, labels: int = MANY) -> Tail | None:
    assert problem.budget_bytes is not None
    return find_tail(merged, problem.budget_bytes, labels, Deadline.after(60))


def bits(blocks: frozenset[int] | tuple[int, ...]) -> int:
    return sum(1 << b for b in blocks)


def random_core(seed: int) -> Core:
    """Unit n makes block n from some before it; each stage reads two."""
    rng = random.Random(seed)
    size = tuple(rng.choice((1, 2, 4)) for _ in range(rng.randint(3, 6)))
    units = []
    for n in range(len(size)):
        reads = tuple(b for b in range(n) if rng.random() < 0.5)
        units.append(Unit(n, reads, (n,), rng.randint(1, 9), rng.choice((0, 0, 2)), True, rng.random() < 0.1))
    stages = []
    for t in range(rng.randint(2, 5)):
        before, reads = rng.randint(0, 3), {rng.randrange(len(size)) for _ in range(2)}
        stages.append(Stage(t, tuple(sorted(reads)), before, before + rng.randint(0, 2)))
    return Core(size, tuple((b,) for b in range(len(size))), tuple(units), tuple(stages), frozenset(), 0)


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 200, 50)], ids=str)
def test_from_every_set_of_blocks_it_is_the_least_that_going_back_costs(seeds: range) -> None:
    tails = 0
    for core in map(random_core, seeds):
        merged, size = unmerged(core), list(core.block_bytes)
        limit = sum(size) * 2 // 3 + 2
        tail = find_tail(merged, limit, MANY, Deadline.after(60))
        if tail is None:
            continue
        tails += 1
        points = [Point(bits(s.reads), s.before_bytes, s.op_bytes) for s in core.stages[tail.start :]]
        runs = [
            Run(u, bits(x.reads), bits(x.makes), x.cost_ns, ((bits(x.reads), merged.lead_bytes(u)),))
            for u, x in enumerate(core.units)
            if not x.pinned
        ]
        for kept in range(1 << len(size)):
            found = min((w.cost_ns for w in tail.ways if not bits(w.needs) & ~kept), default=math.inf)
            assert found == least_ns(size, runs, points, limit, kept)
        assert all(way.peak_bytes <= limit and len(way.runs) == len(points) for way in tail.ways)
    assert tails > 10


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in range(0, 160, 40)], ids=str)
@pytest.mark.parametrize("make", [random_problem, in_groups])
def test_with_a_tail_the_bound_holds_for_every_plan_and_says_no_less(make, seeds: range) -> None:  # type: ignore[no-untyped-def]
    tails = plans = 0
    for asked, optimum_ns in with_optima(map(make, seeds)):
        merged = merge(reduce(asked))
        tail = tail_of(asked, merged)
        if tail is None:
            continue
        tails += 1
        told, bounds = every_stage(merged.core), []
        for refined in (Refined(told), Refined(told, tail=tail)):
            f = build(asked, merged, refined)
            result = f.model.solve(gap=0.0)
            assert result.values is not None
            bounds.append(f.floor_ns(result.bound))
        assert bounds[0] <= bounds[1] <= optimum_ns
        written = expand(asked, merged, decode(f, result.values))
        assert written.plan.cost_ns >= optimum_ns or written.plan.peak_bytes > asked.budget_bytes  # type: ignore[operator]
        plans += written.plan.cost_ns == optimum_ns
    assert tails > 10 and plans > 5


def in_two_sizes(n: int = 6) -> Problem:
    """A chain whose first blocks are the largest, as in a CNN: of them few fit."""
    b = Builder()
    (last,) = b.op("stem", [b.input("x")], 16, ns=5)
    read = [last]
    for i in range(n):
        (wide,) = b.op(f"wide{i}", [last], 16 if i < n // 2 else 4, ns=3)
        (last,) = b.op(f"narrow{i}", [wide], 8 if i < n // 2 else 2, ns=2)
        read += [wide, last]
    dy = b.tangent("dy", 1)
    for i, v in enumerate(reversed(read)):
        (dy,) = b.op(f"b{i}", [dy, v], 2, phase="backward")
    return b.problem([last], [dy])


def at_two_thirds(problem: Problem) -> tuple[Problem, Merged]:
    asked = problem.with_budget(save_all_peak(problem) * 2 // 3)
    return asked, unmerged(reduce(asked))


def test_the_runs_of_a_way_cost_what_it_says_and_need_no_more_memory() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    tail, core = tail_of(asked, merged), merged.core
    assert tail is not None
    for way in tail.ways:
        there, cost = set(way.needs), 0
        for stage, units in zip(core.stages[tail.start :], way.runs, strict=True):
            for u in units:
                assert there.issuperset(core.units[u].reads)
                there.update(core.units[u].makes)
                cost += core.units[u].cost_ns
            assert there.issuperset(stage.reads)
        assert cost == way.cost_ns
        assert way.peak_bytes <= asked.budget_bytes  # type: ignore[operator]


def test_a_plan_of_the_milp_with_a_tail_is_as_cheap_as_one_without() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    tail = tail_of(asked, merged, labels=300)
    plain, told = (
        search(asked, merged, Refined(tightest(merged.core), tail=each), 0.0, Deadline.after(60)).best
        for each in (None, tail)
    )
    assert tail and plain and told
    assert told.plan.cost_ns == plain.plan.cost_ns
    assert told.plan.peak_bytes <= asked.budget_bytes  # type: ignore[operator]


def test_where_all_of_the_backward_pass_is_tail_one_way_is_the_plan() -> None:
    asked = chain(6, ns=3).with_budget(4)
    merged = unmerged(reduce(asked))
    tail = tail_of(asked, merged)
    assert tail is not None and tail.start == 0
    f = build(asked, merged, Refined(tightest(merged.core), tail=tail))
    result = f.model.solve(gap=0.0)
    assert result.values is not None and list(f.told) == []
    written = expand(asked, merged, decode(f, result.values))
    assert written.plan.peak_bytes <= asked.budget_bytes  # type: ignore[operator]
    assert written.plan.cost_ns == f.floor_ns(result.bound) > 0


def test_what_costs_nothing_is_no_tail() -> None:
    problem = in_two_sizes()
    asked = problem.with_budget(save_all_peak(problem))
    assert tail_of(asked, unmerged(reduce(asked))) is None


def test_there_is_no_tail_for_few_labels_or_where_time_is_over() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    assert tail_of(asked, merged, labels=1) is None
    short = tail_of(asked, merged, labels=200)
    whole = tail_of(asked, merged)
    assert whole and (short is None or short.start >= whole.start)


def test_a_unit_that_may_run_late_but_only_once_has_no_tail() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    core = merged.core
    once = replace(core.units[1], pinned=True, required=False)
    late = unmerged(replace(core, units=(core.units[0], once, *core.units[2:])))
    assert tail_of(asked, merged) is not None
    assert tail_of(asked, late) is None


def test_what_a_view_holds_is_among_what_every_way_needs() -> None:
    units = tuple(Unit(n, (), (n,), 3, 0, True, False) for n in range(2))
    stages = (Stage(0, (1,), 0, 0), Stage(1, (0, 1), 0, 0, holds=(1,)))
    core = Core((4, 4), ((0,), (1,)), units, stages, frozenset(), 0)
    small, large = (find_tail(unmerged(core), limit, MANY, Deadline.after(60)) for limit in (7, 8))
    assert small is None and large is None  # nothing fits; and what costs something is saved for nothing
    stages = (Stage(0, (), 5, 5), *stages)
    tail = find_tail(unmerged(replace(core, stages=stages)), 9, MANY, Deadline.after(60))
    assert tail is not None and tail.start == 0
    assert {way.needs: way.cost_ns for way in tail.ways} == {
        frozenset(): 6,
        frozenset({0}): 3,
        frozenset({1}): 3,
    }


def test_ways_within_a_smaller_budget_are_those_that_keep_to_it() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    tail = tail_of(asked, merged)
    assert tail is not None
    peaks = sorted({way.peak_bytes for way in tail.ways})
    fewer = Refined(tightest(merged.core), tail=tail).within(peaks[-1] - 1).tail
    assert fewer is not None and 0 < len(fewer.ways) < len(tail.ways)
    assert fewer.start == tail.start and all(way.peak_bytes < peaks[-1] for way in fewer.ways)


def test_nothing_is_refined_in_a_tail() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    tail = tail_of(asked, merged, labels=300)
    assert tail is not None and tail.start > 2
    refined = Refined(Spans((0,), len(merged.core.stages)), tail=tail)
    f = build(asked, merged, refined)
    result = f.model.solve(gap=0.0)
    assert result.values is not None
    tight = asked.with_budget(asked.budget_bytes // 2)  # type: ignore[operator]
    refine(tight, merged, refined, expand(asked, merged, decode(f, result.values)), strict=True)
    assert refined.in_order or len(refined.spans) > 1
    assert all(t < tail.start for _, t in refined.in_order)
    assert max(refined.spans.starts) <= tail.start


def test_the_improver_chooses_among_the_ways_from_what_is_there() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    tail = tail_of(asked, merged, labels=300)
    start = search(asked, merged, Refined(tightest(merged.core)), 0.0, Deadline.after(60)).best
    assert tail and tail.start > 2 and start
    f = build(asked, merged, Refined(tightest(merged.core), tail=tail))
    said = encode(f, start.draft)
    last = len(f.told)
    assert {x for (b, k), x in f.kept.items() if k == last} == {x for x, (u, _) in said.items() if u is None}
    improver = Improver(asked, lambda: Starts([start]))
    improver.tail = tail
    improver.begin()
    improver.run(0, 0.0, Deadline.after(60))
    assert improver.best and improver.best.plan.cost_ns == start.plan.cost_ns  # which was the optimum


def test_a_plan_for_another_core_is_improved_without_the_tail() -> None:
    asked, merged = at_two_thirds(in_two_sizes())
    improver = Improver(asked, lambda: Starts([]))
    improver.tail = Tail(reduce(asked), 1, ())  # one without ways: nothing would be possible
    start = search(asked, merged, Refined(tightest(merged.core)), 0.0, Deadline.after(60)).best
    assert start
    improver.begin_from(start)
    assert improver.searches[0].refined.tail is None


@cache
def resnet() -> tuple[Problem, Merged]:
    """ResNet-50 at 1.1 times the smallest budget known, above what is resident."""
    problem = Problem.from_json(gzip.decompress(RESNET.read_bytes()).decode())
    asked = problem.with_budget(problem.base_bytes + 1_016_000_000)
    return asked, merge(reduce(asked), 500_000_000)


def test_on_resnet_the_relaxation_says_half_as_much_again_with_its_tail() -> None:
    asked, merged = resnet()
    tail = tail_of(asked, merged, labels=30_000)
    assert tail is not None and len(merged.core.stages) - tail.start > 40
    told = []
    for each in (None, tail):
        f = build(asked, merged, Refined(tightest(merged.core), tail=each))
        told.append(f.floor_ns(f.model.relaxed().solve(gap=0.0).bound))
    assert told[1] > 1.4 * told[0]
