"""Cuts along paths: they take no plan away, on any spans, and make the linear relaxation tight."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import corpus
from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.formulate import Formulation, formulate
from rematc.solve.merge import merge, unmerged
from rematc.solve.model import TOLERANCE
from rematc.solve.paths import Cut, add_cuts, broken
from rematc.solve.reduce import Core, reduce
from rematc.solve.refine import Refined, build
from rematc.solve.spans import Spans, every_stage, tightest
from rematc.solve.tail import find_tail
from rematc.solve.tighten import Cuts, tighten
from tests.dags import random_dag
from tests.graphs import budgets, chain, problems, random_problem, save_all_peak


def optimum(f: Formulation) -> float:
    """Infinite where there is no solution."""
    result = f.model.solve(gap=0.0)
    return math.inf if result.values is None else f.model.objective(result.values)


def spans_of(core: Core, starts: set[int]) -> Spans:
    n = len(core.stages)
    return Spans(tuple(sorted({0, *(s for s in starts if s < n)})), n)


@settings(max_examples=60)
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


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_a_general_graph_is_cut_off(seed: int) -> None:
    problem = Problem.from_networkx(random_dag(seed))
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
    problem = chain(40)
    core = reduce(problem)
    f = formulate(core, save_all_peak(problem) * 2 // 3, every_stage(core))
    best = optimum(f)
    tighten(f, {}, Deadline.after(-1))
    assert optimum(f) == pytest.approx(best, abs=TOLERANCE)
