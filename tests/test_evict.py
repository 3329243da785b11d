"""General graphs in little room: plans within the budget, also where dropping finds none."""

from __future__ import annotations

import math

import pytest

from benchmarks import corpus
from rematc.exchange import from_networkx
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.simulate import simulate, validate
from rematc.solve import solve
from rematc.solve.clock import counted
from rematc.solve.cutting import chain_of
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.evict import evict
from rematc.solve.merge import merge, unmerged
from rematc.solve.reduce import reduce
from rematc.solve.starts import first_plans
from tests import oracle
from tests.dags import random_dag
from tests.graphs import Builder, random_problem, save_all_peak, with_optima

NEVER = Deadline(math.inf)


@pytest.mark.parametrize("seed", range(60))
def test_what_it_finds_is_within_the_budget_and_no_cheaper_than_the_cheapest(seed: int) -> None:
    problem = from_networkx(random_dag(seed))
    merged, most, least = unmerged(reduce(problem)), solve(problem).peak_bytes, oracle.minimum_peak(problem)
    for budget in {least, (least + most) // 2, most}:
        asked = problem.with_budget(budget)
        written = evict(asked, merged, NEVER)
        if written is None:
            assert budget < most
            continue
        validate(asked, written.plan)
        best = oracle.search(asked)
        assert best is not None
        assert best.cost_ns <= written.plan.cost_ns
        assert (written.plan.cost_ns == 0) >= (budget == most)


def test_it_finds_most_of_the_smallest_budgets_of_small_graphs() -> None:
    found = 0
    for seed in range(60):
        problem = from_networkx(random_dag(seed))
        least = oracle.minimum_peak(problem)
        found += evict(problem.with_budget(least), unmerged(reduce(problem)), NEVER) is not None
    assert found >= 45


@pytest.mark.slow
def test_a_budget_that_dropping_does_not_meet_is_kept() -> None:
    problem = large()
    asked = problem.with_budget(int(0.8 * simulate(problem, solve(problem)).peak_bytes))
    merged = unmerged(reduce(asked))
    assert drop(asked, merged) is None
    written = evict(asked, merged, NEVER)
    assert written is not None
    plan = solve(asked, SolveOptions(time_limit_s=5.0))
    validate(asked, plan)
    assert plan.peak_bytes <= asked.budget_bytes
    assert plan.cost_ns <= written.plan.cost_ns


def large() -> Problem:
    return corpus.load("rand100_1")


def test_it_ends_when_it_is_time() -> None:
    problem = large().with_budget(large().base_bytes + 40_000)
    assert evict(problem, unmerged(reduce(problem)), Deadline(-math.inf)) is None


def test_it_counts_all_that_it_looks_at() -> None:
    """To say what is cheapest to make again takes far longer than to make it: a second was half a minute."""
    problem = corpus.load("rand250_0")
    asked = problem.with_budget(int(0.8 * simulate(problem, solve(problem)).peak_bytes))
    merged = unmerged(reduce(asked))
    with counted() as clock:
        evict(asked, merged, Deadline.after(0.5))
        assert 0.5 <= clock.done < 0.6


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 150, 50)], ids=str)
def test_of_a_forward_pass_that_is_saved_which_is_read_while_there_is_room(seeds: range) -> None:
    found = cheapest = 0
    for asked, least_ns in with_optima(map(random_problem, seeds)):
        written = evict(asked, unmerged(reduce(asked)), NEVER)
        if written is not None:
            validate(asked, written.plan)
            assert least_ns <= written.plan.cost_ns
            found, cheapest = found + 1, cheapest + (written.plan.cost_ns == least_ns)
    assert found > 60 and cheapest > 0.5 * found


def towers(n: int, many: int) -> Problem:
    """``many`` towers of ``n`` layers, side by side to the end: so many blocks cross wherever one cuts."""
    b = Builder()
    ends, made = [b.input(f"x{i}") for i in range(many)], list[tuple[int, int, int]]()
    for k in range(n):
        for i in range(many):
            (inner,) = b.op(f"c{k}.{i}", [ends[i]], 8, ns=40)
            (end,) = b.op(f"r{k}.{i}", [inner], 8, ns=4)
            made.append((i, ends[i], end))
            ends[i] = end
    loss = b.op("loss", ends, 1, ns=0)
    grads = b.op("b", [b.tangent("dy", 1)], *[8] * many, phase="backward")
    for i, x, end in reversed(made):
        (d,) = b.op(f"b{len(b.ops)}", [grads[i], end], 8, phase="backward")
        (grads[i],) = b.op(f"b{len(b.ops)}", list(dict.fromkeys((d, x))), 8, phase="backward")
    return b.problem(loss, grads)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5])
def test_where_forward_is_no_chain_it_beats_dropping(share: float) -> None:
    """Dropping makes all anew for each op that reads it: 2 to 4 times the forward pass."""
    problem = towers(12, 6)
    asked = problem.with_budget(int(share * save_all_peak(problem)))
    merged = merge(reduce(asked))
    assert chain_of(merged.core) is None
    dropped, written = drop(asked, merged), evict(asked, merged, NEVER)
    assert dropped and written and written.plan.cost_ns < 0.4 * dropped.plan.cost_ns
    first = first_plans(asked, merged, 0, 0.01, NEVER)
    assert min(w.plan.cost_ns for w in first.plans) == written.plan.cost_ns
