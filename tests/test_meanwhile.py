"""The MILP is solved in a thread while the improver goes on: which of them is first decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module

import pytest

from benchmarks import corpus
from rematc.options import SolveOptions
from rematc.solve import solve
from rematc.solve.model import Result


class AtOnce:
    """In place of a thread: what is submitted is done before anything else."""

    def __init__(self, _: int) -> None: ...

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        done: Future[Result] = Future()
        done.set_result(call())
        return done


class AtLast(AtOnce):
    """It is done once its result is asked for."""

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        class Late(Future[Result]):
            def result(self, timeout: float | None = None) -> Result:
                if not self.done():
                    self.set_result(call())
                return super().result(timeout)

        return Late()


def test_it_decides_nothing_whether_the_milp_or_the_improver_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the bound tells that the improver went on for nothing, what it found is no part of the plan."""
    problem = corpus.load("gpt2_8")
    asked = problem.with_budget(problem.resident_bytes + 9976859290)
    plans = []
    monkeypatch.setattr(import_module("rematc.solve.search"), "HEAD_START_S", 0.0)
    for executor in (AtOnce, AtLast):
        monkeypatch.setattr(import_module("rematc.solve.search"), "ThreadPoolExecutor", executor)
        plans.append(replace(solve(asked, SolveOptions(time_limit_s=60)), solve_s=0.0))
    assert plans[0].status == "optimal"
    assert plans[0] == plans[1]


def test_where_the_last_milp_is_solved_at_once_no_other_plan_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To find one took an MLP of 686 ops 1.5 s at nine tenths of its peak, and the MILP less than a tenth."""
    monkeypatch.setattr(import_module("rematc.solve.search"), "HEAD_START_S", 60.0)
    monkeypatch.setattr(import_module("rematc.solve.solver"), "_starts", lambda *_: pytest.fail("looked for"))
    problem = corpus.load("mlp")
    asked = problem.with_budget(problem.base_bytes + 2_191_027_507)
    plan = solve(asked)
    assert plan.cost_ns > 0 and plan.status == "optimal"


def test_a_plain_chain_s_own_optimum_is_known_in_the_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was looked for in the fourth, and the third took longer than all else."""
    search, rounds = import_module("rematc.solve.search").Search, list[int]()
    round_ = search._round

    def counted(self: object, n: int) -> bool:
        rounds.append(n)
        return bool(round_(self, n))

    monkeypatch.setattr(search, "_round", counted)
    problem = corpus.load("mlp")
    plan = solve(problem.with_budget(problem.base_bytes + 378_423_552), SolveOptions(time_limit_s=60))
    assert plan.status == "optimal" and plan.cost_ns > 0
    assert rounds == [0, 1]
