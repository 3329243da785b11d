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
    for executor in (AtOnce, AtLast):
        monkeypatch.setattr(import_module("rematc.solve.search"), "ThreadPoolExecutor", executor)
        plans.append(replace(solve(asked, SolveOptions(time_limit_s=60)), solve_s=0.0))
    assert plans[0].status == "optimal"
    assert plans[0] == plans[1]
