"""Solutions near the linear relaxation, which large programs are searched by."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from benchmarks import corpus
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.solve import merge as merging
from rematc.solve import nearby as near_by
from rematc.solve import search as searching
from rematc.solve import solve, solver
from rematc.solve.deadline import Deadline
from rematc.solve.formulate import Formulation
from rematc.solve.merge import merge, unmerged
from rematc.solve.model import TOLERANCE, Model, Result
from rematc.solve.nearby import nearby
from rematc.solve.reduce import reduce
from rematc.solve.refine import Refined, build
from rematc.solve.search import search
from rematc.solve.spans import every_stage
from tests import test_search
from tests.graphs import Builder, budgets, problems, random_problem, with_optima


def programs(problem: Problem) -> list[Formulation]:
    """One for each of the problem's budgets, all stages told apart."""
    merged = unmerged(reduce(problem))
    asked = (problem.with_budget(budget) for budget in budgets(problem))
    return [build(each, merged, Refined(every_stage(merged.core))) for each in asked]


def found_near(f: Formulation) -> Result:
    """The solution near that of the relaxation."""
    return nearby(f, f.model.relaxed().solve(gap=0.0), 0.0, Deadline.after(60), 1000)


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_by, "LARGE", 0)


@settings(max_examples=40)
@given(problems(ops=10))
def test_the_bound_is_below_and_the_solution_above_the_optimum(problem: Problem) -> None:
    for f in programs(problem):
        near, whole = found_near(f), f.model.solve(gap=0.0)
        assert near.bound <= whole.bound + TOLERANCE
        if near.values is not None:
            assert f.model.objective(near.values) >= whole.bound - TOLERANCE
            assert all(min(abs(near.values[x]), abs(near.values[x] - 1)) < TOLERANCE for x in f.unit_of)
        elif near.finished:
            assert whole.values is None


@pytest.mark.usefixtures("_large")
def test_what_the_relaxation_says_of_a_unit_in_whole_numbers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_by, "WIDER", (0,))
    split = found = 0
    for problem in map(random_problem, range(200)):
        for f in programs(problem):
            relaxed, near = f.model.relaxed().solve(gap=0.0), found_near(f)
            if relaxed.values is None or near.values is None:
                continue
            apart = {u for x, u in f.unit_of.items() if TOLERANCE < relaxed.values[x] < 1 - TOLERANCE}
            same = [x for x, u in f.unit_of.items() if u not in apart]
            assert all(abs(relaxed.values[x] - near.values[x]) < 10 * TOLERANCE for x in same)
            split, found = split + bool(apart), found + 1
    assert split > 5
    assert found > 2 * split


@pytest.mark.usefixtures("_large")
def test_units_around_are_decided_about_too_where_that_is_not_near_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Llama of 80 layers had to wait for the improver, with a solution 1.3 % above the relaxation."""
    found = [f for seed in (73, 100, 101, 125, 127) for f in programs(random_problem(seed))]
    wide = [cost_near(f) for f in found]
    monkeypatch.setattr(near_by, "WIDER", (0,))
    narrow = [cost_near(f) for f in found]
    assert all(a <= b + TOLERANCE for a, b in zip(wide, narrow, strict=True))
    assert sum(a < b - TOLERANCE for a, b in zip(wide, narrow, strict=True)) > 5


def cost_near(f: Formulation) -> float:
    """What the solution near the relaxation costs; infinite if there is none."""
    values = found_near(f).values
    return math.inf if values is None else f.model.objective(values)


def test_what_is_not_large_is_tried_where_the_relaxation_is_whole_but_for_a_few_units() -> None:
    tried = left = 0
    for f in (f for problem in map(random_problem, range(100)) for f in programs(problem)):
        relaxed, near = f.model.relaxed().solve(gap=0.0), found_near(f)
        if relaxed.values is None:
            continue
        apart = {u for x, u in f.unit_of.items() if TOLERANCE < relaxed.values[x] < 1 - TOLERANCE}
        if len(apart) > near_by.WHOLE * len(f.core.units):
            assert near == Result(None, relaxed.bound, finished=False)
            left += 1
        else:
            assert near.values is not None
            tried += 1
    assert min(tried, left) > 10


def test_densenet_has_a_plan_near_its_relaxation() -> None:
    """The MILP had 12 s, and the plan that came of it was 3.8 % above the bound after 20 s."""
    problem = corpus.load("densenet")
    plan = solve(problem, SolveOptions(time_limit_s=20), budget_bytes=1_388_815_360)
    assert plan.status == "optimal"


def test_the_objective_counts_the_offset() -> None:
    (f, *_) = programs(random_problem(3))
    result = f.model.solve(gap=0.0)
    assert result.values is not None
    assert f.model.objective(result.values) == pytest.approx(result.bound, abs=TOLERANCE)


@pytest.mark.parametrize("rough", [searching.ROUGH, 10.0])
def test_searched_as_a_large_program_plans_are_as_good(rough: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However rough a solution may be on the way, the last one is not."""
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    monkeypatch.setattr(solver, "best_order", lambda problem, _: problem.graph.backward_steps)
    monkeypatch.setattr(near_by, "LARGE", 0)
    monkeypatch.setattr(searching, "ROUGH", rough)
    test_search.test_the_bound_is_below_every_plan_and_most_plans_are_optimal(range(60))


def test_the_whole_program_is_solved_where_nothing_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_by, "LARGE", 0)
    monkeypatch.setattr(searching, "nearby", lambda f, *_: Result(None, 0.0, False))
    for problem, least_ns in with_optima(map(random_problem, range(30))):
        merged = unmerged(reduce(problem))
        found = search(problem, merged, Refined(every_stage(merged.core)), 0.0, Deadline.after(60))
        assert found.bound_ns <= least_ns
        assert found.best is None or found.best.plan.cost_ns >= least_ns


def test_a_solution_that_is_near_is_not_lost_where_the_program_finds_none_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a U-Net for diffusion a plan of 1.10 ms was, and one of 1.32 was the best that was left."""
    solved = Model.solve

    def near(f: Formulation, relaxed: Result, *_: object) -> Result:
        values = solved(f.model, gap=0.0).values
        return Result(values, relaxed.bound, values is not None)

    cases = list(with_optima(map(random_problem, range(30))))
    monkeypatch.setattr(searching, "nearby", near)
    monkeypatch.setattr(searching.Search, "_is_enough", lambda *_: False)
    monkeypatch.setattr(Model, "solve", lambda *_, **__: Result(None, -math.inf, False))
    found = 0
    for problem, least_ns in cases:
        merged = unmerged(reduce(problem))
        best = search(problem, merged, Refined(every_stage(merged.core)), 0.0, Deadline.after(60)).best
        assert best is None or best.plan.peak_bytes <= (problem.budget_bytes or 0)
        assert best is None or best.plan.cost_ns >= least_ns
        found += best is not None and best.plan.cost_ns == least_ns > 0
    assert found >= 20


def read_by_runs_alone() -> Problem:
    """Three layers of a large block each; what makes the second reads a small one, and nothing else does."""
    b = Builder()
    x, dy = b.input("x"), b.tangent("dy")
    (small,) = b.op("small", [x], 2, ns=50)
    (first,) = b.op("first", [x], 100, ns=90)
    (second,) = b.op("second", [first, small], 100, ns=5)
    (third,) = b.op("third", [second], 100, ns=90)
    (result,) = b.op("result", [third], 1)
    for n, value in enumerate((third, second, first)):
        (dy,) = b.op(f"d{n}", [value, dy], 1, phase="backward", workspace=50 * (n == 0))
    return b.problem([result], [dy])


def test_small_blocks_that_runs_alone_read_are_counted_as_long_as_one_can_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget was broken by them again and again, in programs that did not know why."""
    monkeypatch.setattr(merging, "FEW", 0)
    monkeypatch.setattr(merging, "SMALL", 0.02)
    merged = merge(reduce(read_by_runs_alone()), 100)
    assert merged.small_bytes == 2
    assert merged.counted().core.stages == merged.core.stages
    pairs = zip(merged.counted(at_most=True).core.stages, merged.core.stages, strict=True)
    assert [most.op_bytes - stage.op_bytes for most, stage in pairs] == [2, 2, 0, 0]
