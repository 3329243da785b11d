"""What is done in two threads at once: which of them is first decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from threading import Semaphore
from typing import Any

import pytest

from benchmarks import corpus
from rematc.options import SolveOptions
from rematc.solve import solve
from rematc.solve.clock import counted, current, spend
from rematc.solve.deadline import Deadline
from rematc.solve.meanwhile import meanwhile
from rematc.solve.model import Model, Result


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


def test_it_decides_nothing_whether_the_milp_or_the_improver_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Solved before anything else, or beside it: the improver takes the same steps, and finds the same."""
    problem = corpus.load("gpt2_8")
    asked = problem.with_budget(problem.resident_bytes + 9976859290)
    plans = []
    monkeypatch.setattr(import_module("rematc.solve.search"), "HEAD_START_S", 0.0)
    for executor in (AtOnce, ThreadPoolExecutor):
        monkeypatch.setattr(import_module("rematc.solve.meanwhile"), "ThreadPoolExecutor", executor)
        plans.append(replace(solve(asked, SolveOptions(time_limit_s=60)), solve_s=0.0))
    assert plans[0].status == "optimal"
    assert plans[0] == plans[1]


@pytest.mark.parametrize("ahead", [0, 1, 100])
@pytest.mark.parametrize(("work", "step", "steps"), [(3, 1.0, 3), (4, 2.0, 2), (3, 2.0, 2), (1, 9.0, 1)])
def test_as_much_is_done_meanwhile_however_far_the_other_is(
    ahead: int, work: int, step: float, steps: int
) -> None:
    """What is ``work`` seconds is that long, whether it comes to do them before or after each step here."""
    with counted():
        allowed, taken = Semaphore(ahead), 0

        def spend_all() -> str:
            for _ in range(work):
                allowed.acquire()
                spend(1.0)
            return "done"

        with meanwhile(spend_all) as running:
            until = running.until(Deadline(100.0))
            while not allowed.release(1 + int(step)) and until.left() > 0:
                spend(step)
                taken += 1
            allowed.release(work)
            assert running.result() == "done"
        assert taken == steps
        assert current().done == max(work, steps * step)


def test_no_step_is_taken_beside_what_ends_at_once() -> None:
    """It ended when no more was done than before."""
    with counted(), meanwhile(lambda: None) as running:
        assert running.ends_within(0.5) and running.until(Deadline(9.0)).left() == 0
        assert current().done == 0


def test_what_fails_beside_leaves_nobody_waiting() -> None:
    """The error comes with the result."""

    def fail() -> None:
        spend(1.0)
        raise ZeroDivisionError

    with counted(), meanwhile(fail) as running:
        assert not running.ends_within(0.5)
        assert running.until(Deadline(9.0)).left() == 8.5
        with pytest.raises(ZeroDivisionError):
            running.result()


def test_where_the_last_milp_is_solved_at_once_no_other_plan_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To find one took an MLP of 686 ops 1.5 s at nine tenths of its peak, and the MILP less than a tenth."""
    monkeypatch.setattr(import_module("rematc.solve.search"), "HEAD_START_S", 60.0)
    monkeypatch.setattr(
        import_module("rematc.solve.solver"), "first_plans", lambda *_: pytest.fail("looked for")
    )
    problem = corpus.load("mlp")
    asked = problem.with_budget(problem.base_bytes + 2_191_027_507)
    plan = solve(asked)
    assert plan.cost_ns > 0 and plan.status == "optimal"


@pytest.mark.parametrize(("seconds", "is_begun"), [(1.0, False), (40.0, True)])
def test_beside_a_milp_that_overruns_its_time_plans_are_made_cheaper(
    seconds: float, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an early round, too: one took 20 s in place of 4, and there was no time left for anything else."""
    search, solved, begun = import_module("rematc.solve.search").Search, Model.solve, list[int]()

    def slow(model: Model, **limits: Any) -> Result:
        spend(seconds if any(model.integer) else 0.0)
        return solved(model, **limits)

    monkeypatch.setattr(import_module("rematc.solve.nearby"), "WHOLE", -1)
    monkeypatch.setattr(Model, "solve", slow)
    monkeypatch.setattr(search, "_improve", lambda self, *_: begun.append(self.rounds))
    problem = corpus.load("gpt2_4")
    solve(problem.with_budget(problem.base_bytes + 9_046_058_240), SolveOptions(time_limit_s=60))
    assert (0 in begun) is is_begun


def test_beside_a_milp_plans_are_made_cheaper_until_that_or_all_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not just until a search that finds nothing cheap is over: what it overran by was lost."""
    search, solved, left = import_module("rematc.solve.search").Search, Model.solve, list[float]()

    def slow(model: Model, **limits: Any) -> Result:
        spend(40.0 if any(model.integer) else 0.0)
        return solved(model, **limits)

    monkeypatch.setattr(import_module("rematc.solve.nearby"), "WHOLE", -1)
    monkeypatch.setattr(Model, "solve", slow)
    monkeypatch.setattr(search, "_improve", lambda self, until: left.append(until.left()))
    problem = corpus.load("gpt2_4")
    solve(problem.with_budget(problem.base_bytes + 9_046_058_240), SolveOptions(time_limit_s=60))
    assert left[0] > 0.3 * 60 + 20  # the search's time, 0.7, is over by then, or nearly


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
