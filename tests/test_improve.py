"""Plans made cheaper part by part, and plans mended that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import corpus
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.solve import fitting, improve, solve, starts
from rematc.solve import merge as merging
from rematc.solve import search as searching
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode
from rematc.solve.drop import drop
from rematc.solve.expand import expand, keep_all
from rematc.solve.improve import Improver, Starts, mended
from rematc.solve.merge import merge, unmerged
from rematc.solve.reduce import reduce
from rematc.solve.refine import Refined, build
from rematc.solve.search import Found, Search
from rematc.solve.spans import tightest
from rematc.solve.starts import first_plans
from tests.graphs import Builder, chain, save_all_peak


def two_thirds(problem: Problem) -> Problem:
    return problem.with_budget(save_all_peak(problem) * 2 // 3)


def begun(asked: Problem) -> Improver:
    """What improves the plan that is made by dropping."""
    start = drop(asked, unmerged(reduce(asked)))
    assert start is not None
    improver = Improver(asked, lambda: Starts([start]))
    improver.begin()
    return improver


def test_improving_starts_from_a_plan_and_ends_with_one_no_dearer() -> None:
    asked = two_thirds(chain(24, ns=100))
    improver = begun(asked)
    start = improver.best
    improver.run(goal_ns=0, gap=0.0, deadline=Deadline.after(2))
    assert improver.best.plan.peak_bytes <= asked.budget_bytes
    assert improver.best.plan.cost_ns <= start.plan.cost_ns


def test_improving_goes_on_from_a_plan_for_another_core_in_that_core() -> None:
    asked = two_thirds(chain(24, ns=100))
    whole = unmerged(reduce(asked))
    small = merge(whole.core)
    start, other = drop(asked, whole), expand(asked, small, keep_all(small.core))
    assert start is not None
    improver = Improver(asked, lambda: Starts([start]))
    improver.begin()
    improver.offer(start)
    assert improver.searches[0].merged is whole
    improver.offer(other)
    assert [search.merged for search in improver.searches] == [small]
    assert improver.best is other


def test_once_it_is_through_it_begins_anew_from_a_cheaper_plan() -> None:
    improver = begun(two_thirds(chain(24, ns=100)))
    improver.run(goal_ns=0, gap=0.0, deadline=Deadline.after(60))
    (around,) = improver.searches
    assert around.is_through
    cheaper = replace(improver.best, plan=replace(improver.best.plan, cost_ns=1))
    improver.offer(cheaper)
    assert (around.best, around.is_through, next(around.parts, None) is None) == (cheaper, False, False)


def test_what_was_cut_short_everywhere_is_tried_again_once_there_is_far_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Llama's plans near its smallest budget cost twice as much: the search had all but seconds."""
    improver = begun(two_thirds(chain(24, ns=100)))
    (around,) = improver.searches
    start = improver.best.plan.cost_ns
    with monkeypatch.context() as patch:
        patch.setattr(improve, "PATIENCE", 1e-9)
        for _ in range(2):  # no step has longer in the second run
            improver.run(goal_ns=0, gap=0.0, deadline=Deadline.after(60))
            assert (around.is_through, improver.best.plan.cost_ns) == (True, start)
    improver.run(goal_ns=0, gap=0.0, deadline=Deadline.after(60))
    assert improver.best.plan.cost_ns < start


def test_a_step_may_take_a_part_of_the_time_until_the_end_though_the_turn_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a part of the turn each step was cut short, and what it was about was not tried again."""
    improver, limits = begun(two_thirds(chain(200, ns=100))), list[float]()

    def step(self: object, free: object, gap: float, time_limit_s: float) -> bool:
        limits.append(time_limit_s)
        spend(0.2)
        return False

    monkeypatch.setattr(improve._Neighbourhood, "_step", step)
    improver.run(goal_ns=0, gap=0.0, deadline=Deadline.after(0.5), end=Deadline.after(40))
    assert len(limits) == 3 and min(limits) > 0.9 * improve.PATIENCE * 40


@pytest.mark.parametrize("layers", [6, 10, 30])
def test_however_few_there_are_each_start_is_swept_and_the_cheapest_goes_on(layers: int) -> None:
    asked = two_thirds(chain(layers, ns=100))
    merged = unmerged(reduce(asked))
    start = drop(asked, merged)
    assert start is not None
    improver = Improver(asked, lambda: Starts([start, start]))
    improver.begin()
    end = Deadline.after(60)
    improver.run(goal_ns=0, gap=0.0, deadline=end)
    assert len(improver.searches) == 1
    assert end.left() > 0  # all was free at once, and there was nothing left to try


def test_what_breaks_the_budget_is_mended_where_it_does() -> None:
    problem = chain(40, ns=100)
    asked = problem.with_budget(save_all_peak(problem) // 3)
    merged = unmerged(reduce(asked))
    refined = Refined(tightest(merged.core))
    f = build(asked, merged, refined)
    result = f.model.solve(gap=0.0)
    assert result.values is not None
    over = expand(asked, merged, decode(f, result.values))
    assert over.plan.peak_bytes > asked.budget_bytes
    found = mended(asked, over, refined, 0.0, Deadline.after(60))
    assert found is not None and found.plan.peak_bytes <= asked.budget_bytes
    assert refined.size == Refined(tightest(merged.core)).size  # that of the search stays as it was


@pytest.mark.slow
def test_where_no_cheap_plan_is_known_one_far_over_the_budget_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DenseNet a tenth above its smallest budget: what does without a MILP finds nothing cheap there."""
    problem = corpus.load("densenet")
    asked = problem.with_budget(problem.base_bytes + 938 * 10**6)
    merged = merge(unmerged(reduce(asked)).core, 938 * 10**6)
    monkeypatch.setattr(searching, "ROUNDS", 2)
    search = Search(asked, merged, Refined(tightest(merged.core)), 0.01)
    found = search.run(Deadline.after(600))
    over = search.nearest
    assert found.best is None and over is not None
    assert over.plan.peak_bytes > asked.budget_bytes + 10**8
    monkeypatch.setattr(starts, "FINER", ())
    known = first_plans(asked, merged, 938 * 10**6, 0.01, Deadline.after(600)).plans
    assert all(plan.plan.cost_ns > 5 * found.bound_ns for plan in known)
    (start,) = first_plans(asked, merged, 938 * 10**6, 0.01, Deadline.after(600), over).plans
    assert start.plan.peak_bytes <= asked.budget_bytes
    assert start.plan.cost_ns < 1.1 * found.bound_ns


def test_the_improver_has_the_rest_of_the_time_where_the_search_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan near the bound is made cheaper beside the search, but not beside one that is over."""
    problem = chain(14, ns=100)
    asked = problem.with_budget(save_all_peak(problem) * 2 // 3)
    ran = list[Improver]()

    def through(search: Search, *_: object) -> Found:
        found = drop(asked, search.merged)
        assert found is not None
        search.is_over = True
        return Found(found, int(found.plan.cost_ns * 0.95), finished=True)

    monkeypatch.setattr(Search, "run", through)
    monkeypatch.setattr(Improver, "run", lambda improver, *_: ran.append(improver))
    assert solve(asked, SolveOptions(time_limit_s=60)).cost_ns > 0
    assert len(ran) == 1


def with_statistics(layers: int) -> Problem:
    """A chain of blocks of one size, each second one with a small value beside it that backward reads."""
    b = Builder()
    a, small = [b.input("x")], list[int]()
    for i in range(layers):
        made = b.op(f"f{i}", [a[-1]], 100_000, *([10] if i % 2 else []), ns=1 + i % 3)
        a.append(made[0])
        small.append(made[-1])
    dy = b.tangent("dy")
    for i in reversed(range(layers)):
        (dy,) = b.op(f"b{i}", sorted({a[i], small[i], dy}), 1, phase="backward")
    return b.problem([a[-1]], [dy])


def test_the_search_mends_what_breaks_the_budget_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a margin does not help."""
    monkeypatch.setattr(merging, "FEW", 0)
    monkeypatch.setattr(fitting, "_with_margin", lambda *given: None)
    problem = with_statistics(28)
    asked = problem.with_budget(save_all_peak(problem) // 200_000 * 100_000 + 2)
    merged = merge(reduce(asked), 28 * 100_000)
    assert merged.small
    found = searching.search(asked, merged, Refined(tightest(merged.core)), 0.0, Deadline.after(60))
    assert found.best is not None and found.best.plan.peak_bytes <= asked.budget_bytes


@pytest.mark.parametrize("share", [0.5, 0.7, 0.8])
@pytest.mark.parametrize("few", [0, 64])
def test_a_budget_that_only_small_blocks_break_is_met_at_no_more_cost(
    share: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is a whole number of blocks: the relaxation fills it, and the small ones come on top."""
    monkeypatch.setattr(merging, "FEW", few)
    problem = with_statistics(28)
    budget = int(share * save_all_peak(problem)) // 100_000 * 100_000 + 2
    best = solve(problem, SolveOptions(gap=0.0, time_limit_s=60), budget_bytes=budget)
    monkeypatch.setattr(merging, "SMALL", 0)
    every = solve(problem, SolveOptions(gap=0.0, time_limit_s=60), budget_bytes=budget)
    assert every.status == "optimal"
    assert best.cost_ns == every.cost_ns
    assert best.status == "optimal" or not few
