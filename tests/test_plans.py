"""Plans kept from one process to the next: found again, judged again, and never believed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rematc
from rematc import plans
from rematc.baselines import save_all
from rematc.choose import choices_once
from rematc.options import Inner, SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import refusal as refused_with
from rematc.solve import solve
from rematc.solve.solver import CUT
from tests.damaged import read_damaged, saying
from tests.graphs import chain
from tests.small import batch, net, refusal

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS = SolveOptions()
Solve = Callable[[Problem, SolveOptions], Plan]


@pytest.fixture
def problem() -> Problem:
    return chain(8).with_budget(7)


@pytest.fixture
def kept(problem: Problem, tmp_path: Path) -> Plan:
    plan = solve(problem, OPTIONS)
    plans.keep(problem, OPTIONS, plan, tmp_path)
    return plan


def test_a_plan_is_found_again(problem: Problem, kept: Plan, tmp_path: Path) -> None:
    found = plans.load(problem, OPTIONS, tmp_path)
    assert found is not None
    validate(problem, found)
    assert replace(found, notes=kept.notes, solve_s=kept.solve_s) == kept
    assert found.notes[-1] == plans.NOTE and found.solve_s == 0.0


def test_another_budget_problem_or_setting_is_another_plan(
    problem: Problem, kept: Plan, tmp_path: Path
) -> None:
    assert plans.load(problem.with_budget(8), OPTIONS, tmp_path) is None
    assert plans.load(chain(9).with_budget(7), OPTIONS, tmp_path) is None
    assert plans.load(problem, SolveOptions(time_limit_s=5), tmp_path) is None
    assert plans.load(problem, SolveOptions(gap=0.1), tmp_path) is None


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_budget_that_a_refusal_named_is_kept_though_the_search_finds_nothing(
    inner: Inner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where the machine is busier than it was then, ops are measured anew, or the model was explained."""
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))
    with pytest.raises(rematc.BudgetError) as refused:
        torch.compile(net(), backend=rematc.backend(1, inner=inner))(batch())
    least = refused.value.minimum_bytes
    torch._dynamo.reset()
    module = importlib.import_module("rematc.partition")
    asked = {"eager": "solve", "inductor": "fit"}[inner]
    original = getattr(module, asked)

    def unlucky(problem: Problem, options: SolveOptions, *more: Any) -> Any:
        if more and more[-1] is not None:
            return original(problem, options, *more)
        raise refused_with(problem, save_all(problem), bound_bytes=0)

    monkeypatch.setattr(module, asked, unlucky)
    backend = rematc.backend(least, inner=inner, costs="roofline")
    within = net()  # a function: modules have other paths
    torch.compile(lambda x: within(x), backend=backend)(batch()).sum().backward()
    assert backend.plans[0].peak_bytes <= least
    torch._dynamo.reset()
    with pytest.raises(rematc.BudgetError):
        torch.compile(net(), backend=rematc.backend(least - 1, inner=inner))(batch())


def test_what_graphs_of_one_step_may_choose_from_is_found_again_though_costs_are_measured_anew(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal names the smallest budget that plans among them keep: they must be there the next time."""
    other = replace(problem, costs=tuple(replace(c, runtime_ns=c.runtime_ns + 1) for c in problem.costs))
    searched: list[Problem] = []

    def search(asked: Problem, _: SolveOptions) -> tuple[Plan, ...]:
        searched.append(asked)
        return (solve(asked),) if len(searched) == 1 else (save_all(asked),)

    def choices(asked: Problem, options: SolveOptions = OPTIONS) -> tuple[Plan, ...]:
        return choices_once(asked, options, tmp_path)

    monkeypatch.setattr("rematc.choose.choices", search)
    (first,) = choices(problem)
    assert choices(problem) == (first,) and searched == [problem]
    anew = choices(other)
    assert [plan.saved for plan in anew] == [save_all(other).saved, first.saved]
    assert all(plan.digest == other.digest for plan in anew)
    assert anew[1].cost_ns != first.cost_ns and choices(other) == anew
    assert len(searched) == 2
    assert choices(problem, SolveOptions(gap=0.5)) != anew and len(searched) == 3


def test_choices_that_are_damaged_are_searched_anew(
    problem: Problem, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rematc.choose.choices", lambda asked, _: (solve(asked),))

    def choices() -> tuple[Plan, ...]:
        return choices_once(problem, OPTIONS, tmp_path)

    found = choices()
    (path,) = (tmp_path / "plans").iterdir()
    for wrong in ({"plans": ["none"]}, {"plans": 3}, {"more": 1}, {"plans": [save_all(chain(20)).to_json()]}):
        damage = saying(lambda data, wrong=wrong: data.update(wrong))
        again = read_damaged(path, damage, choices, caplog)
        assert [plan.saved for plan in again] == [plan.saved for plan in found]


WRONG: dict[str, dict[str, object]] = {
    "a step that is none": {"backward": [999]},
    "a value that is none": {"saved": [999]},
    "a field more": {"more": 1},
    "a bound that is none": {"bound_ns": -1},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_plan_that_is_none_is_not_used(
    wrong: str, problem: Problem, kept: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (tmp_path / "plans").iterdir()
    damage = saying(lambda data: data.update(WRONG[wrong]))
    assert read_damaged(path, damage, lambda: plans.load(problem, OPTIONS, tmp_path), caplog) is None


def test_a_plan_for_another_graph_under_this_name_is_none(
    problem: Problem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans.keep(problem, OPTIONS, save_all(chain(20)), tmp_path)
    with caplog.at_level(logging.WARNING, "rematc"):
        assert plans.load(problem, OPTIONS, tmp_path) is None
    assert "not used" in caplog.text


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST", 3)
    for n in range(3, 9):
        problem = chain(n)
        plans.keep(problem, OPTIONS, solve(problem), tmp_path)
    assert len(list((tmp_path / "plans").iterdir())) == 3


def test_a_folder_that_can_t_be_written_is_passed_over(
    problem: Problem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plans").write_text("")
    with caplog.at_level(logging.WARNING, "rematc"):
        plans.keep(problem, OPTIONS, solve(problem), tmp_path)
        assert plans.load(problem, OPTIONS, tmp_path) is None
    assert "nothing is kept" in caplog.text


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_second_start_solves_nothing(inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))

    def trained() -> Plan:
        torch._dynamo.reset()
        backend = rematc.backend(refusal().minimum_bytes * 6 // 5, inner=inner)  # type: ignore[arg-type]
        torch.compile(net(), backend=backend)(batch()).sum().backward()
        return backend.plans[0]

    first = trained()

    def fail(*_: object, **__: object) -> Plan:
        raise AssertionError("solved again")

    monkeypatch.setattr(importlib.import_module("rematc.partition"), "solve", fail)
    monkeypatch.setattr("rematc.fit.solve", fail)
    second = trained()
    assert (second.saved, second.backward, second.cost_ns, second.gap) == (
        first.saved, first.backward, first.cost_ns, first.gap,
    )  # fmt: skip
    assert second.notes[-1] == plans.NOTE or plans.NOTE in second.notes


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Solve], Plan]:
    """The plan that a new start takes, where its searches are done by what is given."""
    monkeypatch.setenv("REMATC_CACHE_DIR", str(tmp_path))
    budget = refusal().minimum_bytes * 6 // 5

    def trained_by(search: Solve) -> Plan:
        torch._dynamo.reset()
        monkeypatch.setattr(importlib.import_module("rematc.partition"), "solve", search)
        backend = rematc.backend(budget, inner="eager", costs="roofline")
        torch.compile(net(), backend=backend)(batch()).sum().backward()
        return backend.plans[0]

    return trained_by


def cut(problem: Problem, budget_bytes: int) -> Plan:
    plan = solve(problem, OPTIONS, budget_bytes=budget_bytes)
    return replace(plan, notes=(*plan.notes, CUT))


def test_a_plan_that_the_clock_cut_is_searched_for_once_more(trained: Callable[[Solve], Plan]) -> None:
    """On a busy machine it may be the greedy one: kept for good, each later start would run it."""
    searched = list[Problem]()

    def search(problem: Problem, options: SolveOptions) -> Plan:
        searched.append(problem)
        least, asked = refusal().minimum_bytes, problem.budget_bytes or 0
        return cut(problem, least if len(searched) == 1 else asked)

    first, second, third = (trained(search) for _ in range(3))
    assert len(searched) == 2
    assert second.cost_ns < first.cost_ns and third.cost_ns == second.cost_ns
    assert plans.TWICE in second.notes and plans.NOTE not in second.notes
    assert third.notes[-1] == plans.NOTE


def test_a_plan_of_the_lowest_peak_taken_because_the_clock_ended_a_search_is_none_to_keep(
    trained: Callable[[Solve], Plan], tmp_path: Path
) -> None:
    def refused(problem: Problem, budget_bytes: int, was_cut: bool) -> Plan:
        floor = solve(problem, OPTIONS, budget_bytes=budget_bytes)
        notes = (CUT,) if was_cut else ()
        raise refused_with(problem, replace(floor, notes=notes), bound_bytes=0)

    least = refusal().minimum_bytes
    with pytest.raises(rematc.BudgetError):  # in an earlier run, with time: its plan is kept
        torch.compile(net(), backend=rematc.backend(least - 1, inner="eager", costs="roofline"))(batch())
    first = trained(lambda problem, _: refused(problem, least * 2, was_cut=True))
    second = trained(lambda problem, _: solve(problem, OPTIONS))
    assert CUT in first.notes
    assert second.cost_ns < first.cost_ns and CUT not in second.notes


def test_where_a_second_search_finds_nothing_the_first_plan_stays(trained: Callable[[Solve], Plan]) -> None:
    def unlucky(problem: Problem, options: SolveOptions) -> Plan:
        raise refused_with(problem, save_all(problem), bound_bytes=0)

    first = trained(lambda problem, options: cut(problem, problem.budget_bytes or 0))
    second = trained(unlucky)
    assert (second.saved, second.backward) == (first.saved, first.backward)
    assert plans.TWICE in second.notes
