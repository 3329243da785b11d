"""Work is counted in place of time, so what a limit cuts short is cut alike however fast the machine is."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from importlib import import_module
from threading import Event, Thread

import pytest

from benchmarks import corpus
from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.solve import solve
from rematc.solve.clock import Clock, counted, current, paused, spend
from rematc.solve.deadline import Deadline
from rematc.solve.model import Model, Result
from rematc.solve.relaxation import Relaxation
from rematc.solve.solver import CUT

CLOCK = "rematc.solve.clock"


def solved(asked: Problem, seconds: float) -> Plan:
    return replace(solve(asked, SolveOptions(time_limit_s=seconds)), solve_s=0.0)


def knapsack(n: int) -> Model:
    """The dearest of ``n`` things within eight limits: it takes a search tree."""
    rng, m = random.Random(n), Model()
    things = [m.variable(cost=-rng.randint(20, 40)) for _ in range(n)]
    for _ in range(8):
        m.row([(x, rng.randint(10, 60)) for x in things], 12.0 * n)
    return m


def test_what_is_counted_inside_is_spent_outside_too() -> None:
    """A lowering that solves several times has one limit for all."""
    with counted() as whole:
        for seconds in (1.0, 2.0):
            with counted(limit_s=9.0):
                spend(seconds)
        assert whole.done == 3.0


def test_a_pause_takes_no_time() -> None:
    """Work in it is not counted, and the guard waits as long."""
    with counted(limit_s=9.0) as clock:
        before = clock.guard
        with paused(limit_s=5.0) as inside:
            spend(4.0)
            assert Deadline(5.0).left() == 1.0
        assert inside.done == 4.0 and clock.done == 0.0 and clock.guard > before


def test_what_an_error_ended_was_counted() -> None:
    """A refusal takes time as well."""

    def fail() -> None:
        with counted(limit_s=9.0):
            spend(2.0)
            raise ZeroDivisionError

    with counted() as clock:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert clock.done == 2.0


def test_the_guard_ends_what_counts_too_little() -> None:
    """And it is known that it did; a deadline that is over anyway was not cut."""
    clock = Clock(done=3.0, guard=-math.inf)
    assert clock.left(2.0) == -1.0 and not clock.was_cut
    assert clock.left(9.0) == 0.0 and clock.was_cut


def test_a_milp_counts_what_it_does_and_a_relaxation_too() -> None:
    """The one by the log of HiGHS, up to its end; the other by iterations, as many as there is time for."""
    done = []
    for _ in range(2):
        with counted() as clock:
            assert knapsack(30).solve(gap=0.0).finished
            done.append(clock.done)
    assert done[0] == done[1] > 0
    with counted() as clock:
        assert Relaxation(knapsack(30)).solve(math.inf).finished
        assert 0 < clock.done < done[0]
        assert not Relaxation(knapsack(30)).solve(1e-9).finished


def test_a_milp_tells_how_far_it_is_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it to come as far goes on then; so HiGHS's log must read as it did."""
    told = list[int]()
    meter = import_module("rematc.solve.model")._Meter
    count = meter.count
    monkeypatch.setattr(meter, "count", lambda self, n: (told.append(n), count(self, n)))
    with counted():
        assert knapsack(40).solve(gap=0.0).finished
    assert len(set(told)) > 5 and told == sorted(told)


def test_a_short_limit_is_one_of_nodes() -> None:
    """Counted, so that the solution is the same on every machine, also one that is busy with more."""
    model = knapsack(40)
    best = model.solve(gap=0.0)
    short = [model.solve(gap=0.0, time_limit_s=0.015) for _ in range(2)]
    assert best.finished and not short[0].finished and short[0] == short[1]
    assert -math.inf < short[0].bound < best.bound


@pytest.mark.parametrize("counts", [0.0, 90.0])
def test_of_a_milp_that_real_time_ended_nothing_is_known_but_its_limit(
    counts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had found by then would depend on how fast the machine is; so would what it had counted."""
    module = import_module("rematc.solve.model")
    monkeypatch.setattr(module, "SLOW", 0.0)
    monkeypatch.setattr(module._Meter, "count", lambda self, _: self.clock.spend(counts))
    with counted(60.0) as clock:
        assert knapsack(90).solve(gap=0.0, time_limit_s=20.0) == Result(None, -math.inf, False)
        assert clock.was_cut and clock.done == 20.0


def test_a_milp_that_would_take_longer_is_not_begun() -> None:
    """It has no limit before its first branch."""
    found = knapsack(30).solve(gap=0.0, time_limit_s=1e-3)
    assert found.values is None and found.bound == -math.inf and not found.finished
    assert knapsack(30).solve(gap=0.0, time_limit_s=60.0).finished


@pytest.mark.parametrize(("name", "above_bytes"), [("llama8", 41_168_803), ("rand100_1", 48_272)])
def test_a_plan_that_the_limit_cut_short_is_the_same_on_a_busy_machine(
    name: str, above_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work ends the search, not time, unless that is short by far."""
    monkeypatch.setattr(import_module(CLOCK), "GUARD", math.inf)
    problem = corpus.load(name)
    asked = problem.with_budget(problem.base_bytes + above_bytes)
    alone = solved(asked, 1.0)
    stop = Event()
    other = Thread(target=lambda: [sum(range(10_000)) for _ in iter(stop.is_set, True)])
    other.start()
    try:
        beside = solved(asked, 1.0)
    finally:
        stop.set()
        other.join()
    assert alone.status != "optimal" and alone.cost_ns > 0  # there was more to be found
    assert alone == beside


def test_a_plan_says_that_the_clock_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then another run may find another."""
    monkeypatch.setattr(import_module(CLOCK), "GUARD", 0.0)
    problem = corpus.load("gpt2_4")
    plan = solved(problem.with_budget(problem.base_bytes + 9_046_058_240), 60.0)
    assert CUT in plan.notes


def test_a_refusal_says_so_too_and_so_does_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = corpus.load("gpt2_4").with_budget(1)
    with pytest.raises(BudgetError) as whole:
        solved(problem, 60.0)
    assert not whole.value.was_cut and "the clock ended" not in str(whole.value)
    monkeypatch.setattr(import_module(CLOCK), "GUARD", 0.0)
    with pytest.raises(BudgetError) as cut:
        solved(problem, 60.0)
    assert cut.value.was_cut and CUT in cut.value.plan.notes
    for error in (cut.value, copy.copy(cut.value)):
        assert "the clock ended the search: another run" in str(error)


def test_each_thread_has_a_clock_of_its_own() -> None:
    """Two models may be compiled at once."""
    with counted() as clock:
        spend(1.0)
        found = []
        thread = Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
        assert found[0] is not clock and found[0].done == 0.0
