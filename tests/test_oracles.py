"""The benchmark's two oracles, Checkmate and Moccasin, against exhaustive search and each other."""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.oracles import checkmate, moccasin
from benchmarks.oracles.fold import sequence
from benchmarks.oracles.sequence import Outcome
from rematc.errors import ProblemError
from rematc.graph import Graph, Op, Value
from rematc.plan import Plan
from rematc.problem import OpCost, Problem
from rematc.simulate import simulate, validate
from tests import oracle
from tests.graphs import Builder, budgets, chain, random_problem, save_all_peak, skip

ALL = 9  # runs of one op: more than any plan of these problems has


def tiny_dag(seed: int, ops: int = 7) -> Problem:
    """A DAG of one sink: an op reads one to three values, the last all that nobody read."""
    rng = random.Random(seed)
    b = Builder()
    made: list[int] = []
    for i in range(ops):
        reads = {
            *rng.sample(made[-3:], min(i, rng.choice([1, 1, 2]))),
            *rng.sample(made, min(i, rng.randint(0, 1))),
        }
        if i == ops - 1:
            reads |= {*made} - {v for op in b.ops for v in op.inputs}
        size, ns, workspace = (
            rng.choice([0, 1, 2, 3, 5]),
            rng.choice([0, 1, 2, 5, 9]),
            rng.choice([0, 0, 0, 2]),
        )
        made += b.op(f"n{i}", sorted(reads), size, ns=ns, workspace=workspace)
    return b.problem([], [made[-1]])


def training_step(seed: int) -> Problem:
    return replace(random_problem(seed), meanwhile_bytes=0)  # neither formulation knows of those


def once_peak(problem: Problem) -> int:
    return simulate(problem, Plan((), tuple(range(len(problem.graph.ops))))).peak_bytes


def cheapest(problem: Problem, staged: bool, copies: int = ALL) -> int | None:
    """The least cost of recomputation of a DAG, by Dijkstra's algorithm over (runs of each op, values there).

    ``staged``: first runs in the graph's order; between two of them, in that order too, each op once at most.
    Otherwise in any order. Values are dropped before an op, in every way.
    """
    ops, wanted = problem.graph.ops, {*problem.graph.gradients}
    start = ((0,) * len(ops), frozenset[int](), -1)
    best = {start: 0}
    heap = [(0, start)]
    while heap:
        cost, state = heapq.heappop(heap)
        runs, there, last = state
        if cost > best[state]:
            continue
        if wanted <= there:
            return cost
        frontier = runs.index(0) if 0 in runs else len(ops)
        for i in range(len(ops)):
            if (runs[i] == copies < ALL) or (staged and not last < i <= frontier):
                continue
            most = copies if copies < ALL else 1  # beyond that it does not matter how often
            more = tuple(min(most, n + (j == i)) for j, n in enumerate(runs))
            total = cost + (problem.costs[i].runtime_ns if runs[i] else 0)
            for left in after(problem, there, i):
                following = (more, left, (-1 if i == frontier else i) if staged else -1)
                if total < best.get(following, total + 1):
                    best[following] = total
                    heapq.heappush(heap, (total, following))
    return None


def after(problem: Problem, there: frozenset[int], i: int) -> Iterator[frozenset[int]]:
    """What can be there once op ``i`` has run, if it can: one set for each way to drop some before it."""
    op, size = problem.graph.ops[i], problem.graph.storage_bytes
    if not there >= {*op.inputs} or (problem.budget_bytes is None):
        return
    loose = sorted(there - {*op.inputs, *op.outputs})
    fixed = {*op.inputs, *op.outputs}
    for mask in range(1 << len(loose)):
        kept = {v for n, v in enumerate(loose) if mask >> n & 1} | fixed
        if sum(size[v] for v in kept) + problem.costs[i].workspace_bytes <= problem.budget_bytes:
            yield frozenset(kept)


def summary(found: Outcome) -> tuple[int | None, int, str]:
    return (found.plan.cost_ns if found.plan else None, found.bound_ns, found.status)


def expected(cost: int | None) -> tuple[int | None, int, str]:
    return (cost, cost or 0, "infeasible" if cost is None else "optimal")


@pytest.mark.parametrize("seed", range(40))
def test_checkmate_equals_an_exhaustive_search_of_training_steps(seed: int) -> None:
    problem = training_step(seed)
    for budget in budgets(problem)[:2]:
        asked = problem.with_budget(budget)
        best = oracle.search(asked)
        assert best is not None
        assert summary(checkmate.solve(asked)) == expected(best.cost_ns)
    assert checkmate.solve(problem.with_budget(budgets(problem)[0] - 1)).status == "infeasible"


@pytest.mark.parametrize("seed", range(14))
def test_moccasin_equals_an_exhaustive_search_if_ops_may_run_often(seed: int) -> None:
    problem = training_step(seed)
    asked = problem.with_budget(budgets(problem)[0])
    best = oracle.search(asked)
    assert best is not None
    often = moccasin.solve(asked, copies=ALL, workers=1)
    assert summary(often) == expected(best.cost_ns)
    twice = moccasin.solve(asked, workers=1)
    assert twice.plan is None or twice.bound_ns == twice.plan.cost_ns >= best.cost_ns
    tight = moccasin.solve(problem.with_budget(budgets(problem)[0] - 1), copies=ALL, workers=1)
    assert tight.status == "infeasible"


@pytest.mark.parametrize("seed", range(12))
def test_both_equal_a_brute_force_of_their_class_on_dags(seed: int) -> None:
    problem = tiny_dag(seed)
    peak = once_peak(problem)
    for budget in (peak, peak - 1, peak * 3 // 4):
        asked = problem.with_budget(budget)
        best = cheapest(asked, staged=True)
        assert summary(checkmate.solve(asked)) == expected(best)
        assert summary(moccasin.solve(asked, copies=ALL, workers=1)) == expected(best)
        twice = cheapest(asked, staged=True, copies=2)
        assert summary(moccasin.solve(asked, workers=1)) == expected(twice)
        free = cheapest(asked, staged=False)
        assert best is None or (free is not None and free <= best)


@pytest.mark.parametrize("seed", range(6))
def test_moccasin_s_reservoirs_say_the_same_as_its_literals(seed: int) -> None:
    problem = tiny_dag(seed)
    asked = problem.with_budget(once_peak(problem) - 1)
    literals, reservoirs = (moccasin.solve(asked, workers=1, reservoir=r) for r in (False, True))
    assert summary(literals) == summary(reservoirs)


@pytest.mark.parametrize("problem", [chain(7, ns=10), skip(3)], ids=["chain", "skip"])
def test_both_agree_on_families_and_their_plans_hold_the_budget(problem: Problem) -> None:
    low, high = budgets_of_family(problem)
    for budget in (low, (low + high) // 2, high, None):
        asked = problem.with_budget(budget)
        ours, theirs = checkmate.solve(asked), moccasin.solve(asked, copies=ALL, workers=1)
        assert summary(ours) == summary(theirs)
        assert ours.plan is not None and theirs.plan is not None
        validate(asked, ours.plan)
        validate(asked, theirs.plan)


def budgets_of_family(problem: Problem) -> tuple[int, int]:
    """The smallest that Checkmate can meet, and one that costs nothing."""
    low, high = 0, save_all_peak(problem)
    least = bisect.bisect_left(
        range(low, high), 1, key=lambda b: int(checkmate.solve(problem.with_budget(b)).plan is not None)
    )
    return least, high


def test_pauses_are_stages_without_an_op_of_their_own() -> None:
    assert len(sequence(chain(2), pauses=1).stages) == 1 + 2 * 2
    assert len(sequence(tiny_dag(0), pauses=1).stages) == 2 * len(tiny_dag(0).graph.ops) - 1


def test_what_an_oracle_can_t_pose_is_refused() -> None:
    graph = Graph((0, 8), (Value("x", 0), Value("a", 1), Value("view", 1)), (
        Op("f", "sin", (0,), (1,)), Op("view", "t", (1,), (2,)),
    ), inputs=(0,), outputs=(2,))  # fmt: skip
    with pytest.raises(ProblemError, match="a view at a price"):
        checkmate.solve(Problem(graph, (OpCost(5), OpCost(5)), budget_bytes=8))


def test_when_the_time_is_up_an_oracle_says_so() -> None:
    problem = tiny_dag(3, ops=40)
    asked = problem.with_budget(once_peak(problem) * 2 // 3)
    for found in (
        checkmate.solve(asked, time_limit_s=0.01),
        moccasin.solve(asked, time_limit_s=0.01, workers=1),
    ):
        assert found.status in ("feasible", "unknown", "infeasible")
        assert found.plan is None or found.bound_ns <= found.plan.cost_ns
