"""Cuts along paths: they take no plan away, on any spans, and make the linear relaxation tight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import corpus
from rematc.problem import Problem
from rematc.solve.alike import Alike
from rematc.solve.deadline import Deadline
from rematc.solve.formulate import Formulation, formulate
from rematc.solve.merge import merge, unmerged
from rematc.solve.model import TOLERANCE, Model, Result
from rematc.solve.paths import Cut, add_cuts, broken
from rematc.solve.reduce import Core, reduce
from rematc.solve.refine import Refined, build
from rematc.solve.relaxation import Relaxation
from rematc.solve.spans import Spans, every_stage, tightest
from rematc.solve.tail import find_tail
from rematc.solve.tighten import Cuts, tighten
from tests.dags import random_dag
from tests.graphs import budgets, chain, problems, random_problem, save_all_peak


def optimum(f: Formulation) -> float:
    """Infinite where there is no solution."""
    result = f.model.solve(gap=0.0)
    return math.inf if result.values is None else f.model.objective(result.values)


def of_dag(seed: int) -> Problem:
    return Problem.from_networkx(random_dag(seed))


def spans_of(core: Core, starts: set[int]) -> Spans:
    n = len(core.stages)
    return Spans(tuple(sorted({0, *(s for s in starts if s < n)})), n)


@settings(max_examples=15)
@given(problems(ops=9), st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)))
def test_no_plan_is_cut_off(problem: Problem, few: set[int], more: set[int]) -> None:
    """Nor by the cuts of fewer spans, once some of those are told apart."""
    core = reduce(problem)
    for budget in budgets(problem):
        cuts: Cuts = {}
        for spans in (spans_of(core, few), spans_of(core, few | more), every_stage(core)):
            without, tight = (formulate(core, budget, spans) for _ in range(2))
            tighten(tight, cuts, Deadline.after(60))
            assert optimum(tight) == pytest.approx(optimum(without), abs=1e-5)


def every_cut(core: Core, spans: Spans) -> list[Cut]:
    """All that `Alike.is_true` says are cuts, along paths of three blocks at most."""
    alike, ends = Alike(core), (*spans.starts, spans.n_stages)
    paths = [(u, (b,)) for u, unit in enumerate(core.units) for b in unit.makes]
    for _ in range(2):
        more = [(u, p, w) for u, p in paths for w in core.readers[p[-1]]]
        paths += [(u, (*p, b)) for u, p, w in more for b in core.units[w].makes]
    asked: list[dict[str, Any]] = [
        {},
        *({"run": (w, t)} for w in range(len(core.units)) for t in spans.starts),
    ]
    found = (
        Cut(u, path, first, end, **what)
        for u, path in dict.fromkeys(paths)
        for i, first in enumerate(ends)
        for end in ends[i + 1 :]
        for what in [*asked, {"kept": path[-1]}]
        if "run" not in what or first <= what["run"][1] < end
    )
    return [cut for cut in found if alike.is_true(cut)]


@pytest.mark.parametrize("make", [random_problem, of_dag])
def test_none_of_all_the_cuts_takes_a_plan_away(make: Callable[[int], Problem]) -> None:
    tried = 0
    for problem in map(make, range(8)):
        core = reduce(problem)
        spans = spans_of(core, {2, 3, 5, 8})
        cuts = every_cut(core, spans)
        tried += len(cuts)
        for budget in budgets(problem):
            without, tight = (formulate(core, budget, spans) for _ in range(2))
            add_cuts(tight, cuts)
            assert optimum(tight) == pytest.approx(optimum(without), abs=1e-5)
    assert tried > 200


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_a_general_graph_is_cut_off(seed: int) -> None:
    problem = of_dag(seed)
    core = reduce(problem)
    for budget in budgets(problem):
        for spans in (spans_of(core, {3, 5, 8}), every_stage(core)):
            without, tight = (formulate(core, budget, spans) for _ in range(2))
            tighten(tight, {}, Deadline.after(60))
            assert optimum(tight) == pytest.approx(optimum(without), abs=1e-5)


def test_no_way_through_a_tail_is_cut_off() -> None:
    compared = 0
    for problem in map(random_problem, range(60)):
        merged = unmerged(reduce(problem))
        for budget in budgets(problem):
            tail = find_tail(merged, budget, 10_000, Deadline.after(60))
            if tail is None:
                continue
            asked, refined = problem.with_budget(budget), Refined(every_stage(merged.core), tail=tail)
            without, tight = (build(asked, merged, refined) for _ in range(2))
            tighten(tight, refined.cuts, Deadline.after(60))
            assert optimum(tight) == pytest.approx(optimum(without), abs=1e-5)
            compared += 1
    assert compared > 20


@settings(max_examples=60)
@given(problems(ops=9))
def test_what_is_asked_for_is_there_in_the_end(problem: Problem) -> None:
    """A solution in whole numbers breaks none: so what is looked for is what the rows say."""
    core = reduce(problem)
    for budget in budgets(problem):
        f = formulate(core, budget, every_stage(core))
        result = f.model.solve(gap=0.0)
        assert result.values is None or broken(f, result.values) == []


def test_the_relaxation_is_tight() -> None:
    """Without them a fraction of each block is had for a fraction of its price, span by span."""
    problem = corpus.load("vgg16")
    core = merge(reduce(problem)).core
    spans = tightest(core).alone(range(0, len(core.stages), 6))
    f = formulate(core, save_all_peak(problem) * 3 // 4, spans)
    loose = f.model.relaxed().solve(gap=0.0)
    cuts: Cuts = {}
    tight = tighten(f, cuts, Deadline.after(60))
    assert tight.bound > 1.3 * loose.bound > 0
    again = f.model.relaxed().solve(gap=0.0)
    assert again.bound == pytest.approx(tight.bound, rel=1e-6)  # those that matter are in the program
    assert 0 < len(cuts) < len(f.core.units) * len(spans)


def test_a_cut_is_a_row_wherever_its_stages_begin_spans() -> None:
    core = reduce(chain(6))
    cut = Cut(unit=0, blocks=(0, 1), first=2, end=5)
    for starts, rows in (((0, 2, 5), 1), ((0, 2, 3, 5), 1), ((0, 3, 5), 0)):
        f = formulate(core, 10**9, Spans(starts, len(core.stages)))
        before = f.model.n_rows
        add_cuts(f, [cut])
        assert f.model.n_rows - before == rows


def test_a_copy_of_what_is_refined_has_cuts_of_its_own() -> None:
    first = Refined(Spans((0,), 4))
    first.within(0).cuts[Cut(0, (0,), 0, 4)] = None
    assert first.cuts == {}
    assert replace(first).cuts is first.cuts


def test_without_time_there_is_no_solution_and_no_harm() -> None:
    problem = chain(16)
    core = reduce(problem)
    f = formulate(core, save_all_peak(problem) * 2 // 3, every_stage(core))
    best = optimum(f)
    tighten(f, {}, Deadline.after(-1))
    assert optimum(f) == pytest.approx(best, abs=TOLERANCE)


def test_a_row_for_a_stage_leaves_every_plan_in() -> None:
    """It tells more than its span does, and no more than if all stages were told apart."""
    raised = 0
    for problem in map(random_problem, range(80)):
        merged = unmerged(reduce(problem))
        n = len(merged.core.stages)
        for budget in budgets(problem):
            asked = problem.with_budget(budget)
            spans = spans_of(merged.core, {n // 2})
            without = optimum(build(asked, merged, Refined(spans)))
            rows = optimum(build(asked, merged, Refined(spans, stages=set(range(n)))))
            apart = optimum(build(asked, merged, Refined(every_stage(merged.core))))
            assert without - 1e-5 <= rows <= apart + 1e-5
            raised += rows > without + 1e-5
    assert raised > 10


def test_what_is_found_of_one_layer_is_said_of_all() -> None:
    core = merge(reduce(corpus.load("llama_8"))).core
    alike = Alike(core)
    spans = tightest(core).alone(range(0, len(core.stages), 40))
    f = formulate(core, 10**12, spans)
    cuts = broken(f, [0.0] * len(f.model.cost))
    more = list(alike.of(cuts))
    assert all(alike.is_true(cut) for cut in more)
    (_, most) = Counter((cut.first, cut.end, alike.kinds[cut.unit]) for cut in more).most_common(1)[0]
    assert most >= 8


def test_a_path_that_is_none_is_no_cut() -> None:
    core = reduce(chain(6))
    alike, end = Alike(core), len(core.stages)
    true = Cut(0, (0, 1), 0, end)
    assert alike.is_true(true)
    for false in (
        replace(true, blocks=(1,)),  # not the unit's own
        replace(true, blocks=(0, 2)),  # not read by the one that makes it
        replace(true, blocks=(0, 99)),
        replace(true, end=1),  # nobody reads the last so early
        replace(true, run=(0, 0)),
    ):
        assert not alike.is_true(false)


def test_fixed_variables_do_not_move_and_a_broken_program_has_no_solution() -> None:
    m = Model()
    x, y = m.variable(cost=2.0), m.variable(cost=3.0)
    m.row([(x, -1.0), (y, -1.0)], -1.0)
    relaxed = Relaxation(m, {x: 0.25})
    assert relaxed.solve(60).values == pytest.approx([0.25, 0.75])
    relaxed.add([([(y, 1.0)], 0.5), ([(x, 1.0)], 1.0)])
    assert relaxed.solve(60) == Result(None, math.inf, True)
    empty = Model(offset=4.0)
    assert Relaxation(empty).solve(60) == Result([], 4.0, True)
    empty.row([], -1.0)
    assert Relaxation(empty).solve(60) == Result(None, math.inf, True)
