"""Units merged, and small blocks left out: no optimum changes by the one, no bound breaks by the other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import merge as merging
from rematc.solve import solver
from rematc.solve.deadline import Deadline
from rematc.solve.decode import encode
from rematc.solve.drop import drop
from rematc.solve.expand import restated
from rematc.solve.merge import Merged, merge, unmerged
from rematc.solve.reduce import Core, reduce
from rematc.solve.refine import Refined, build, complete
from rematc.solve.search import search
from rematc.solve.spans import every_stage, tightest
from tests.graphs import Builder, budgets, problems, random_problem, with_optima
from tests.test_search import solved


@settings(max_examples=40)
@given(problems(ops=10))
def test_merging_leaves_every_block_that_backward_reads(problem: Problem) -> None:
    core = reduce(problem)
    merged = merge(core)
    read = {b for stage in core.stages for b in stage.reads}
    assert read <= set(merged.full_block)
    assert sum(len(parts) for parts in merged.parts) == len(core.units)
    assert sum(u.cost_ns for u in merged.core.units) == sum(u.cost_ns for u in core.units)


@settings(max_examples=40)
@given(problems(ops=9))
def test_merging_changes_no_optimum(problem: Problem) -> None:
    """A chain that runs apart can need less memory, never less time: costs agree where both have a plan."""
    for budget in budgets(problem)[1:]:
        asked = problem.with_budget(budget)
        full = reduce(asked, pauses=1)
        costs = []
        for merged in (unmerged(full), merge(full)):
            found = search(asked, merged, complete(merged.core), 0.0, Deadline.after(60)).best
            costs.append(None if found is None else found.plan.cost_ns)
        assert costs[1] is None or costs[0] == costs[1]


def in_groups(seed: int) -> Problem:
    """Two layers of ops that are read by one other, of random sizes, and a backward pass with workspace."""
    rng = random.Random(seed)
    b = Builder()
    last, made = b.input("x"), []
    for layer in range(2):
        inner = [
            b.op(f"{layer}.{n}", [last], rng.choice((1, 4, 8)), ns=rng.choice((1, 5, 20)))[0]
            for n in range(rng.randint(1, 2))
        ]
        if rng.random() < 0.3:
            inner[0] = b.op(f"{layer}.then", [inner[0]], rng.choice((1, 4, 8)), ns=rng.choice((1, 5, 20)))[0]
        reads = [*inner, last] if rng.random() < 0.3 else inner
        (last,) = b.op(
            f"{layer}.end", reads, rng.choice((2, 4, 8)), ns=rng.choice((1, 5)), workspace=rng.choice((0, 3))
        )
        made.append(last)
    out = b.op("out", [last], 1)
    dy = b.tangent("dy", 1)
    for n, v in enumerate(reversed(made)):
        (dy,) = b.op(f"b{n}", [dy, v], 1, phase="backward", workspace=rng.choice((0, 0, 6)))
        (dy,) = b.op(f"c{n}", [dy], 1, phase="backward", workspace=rng.choice((0, 4, 10)))
    return b.problem(out, [dy])


def in_ties(seed: int) -> Problem:
    """Two sums of what goes round some ops and what comes out of them, of random sizes."""
    rng = random.Random(seed)
    b = Builder()
    last, made = b.input("x"), []
    for layer in range(2):
        (inner,) = b.op(f"{layer}.in", [last], rng.choice((4, 8)), ns=rng.choice((1, 5, 20)))
        made.append(inner)
        (normed,) = b.op(
            f"{layer}.norm",
            [inner],
            rng.choice((4, 8, 8)),
            ns=rng.choice((1, 5)),
            workspace=rng.choice((0, 0, 3)),
        )
        (last,) = b.op(
            f"{layer}.sum",
            [last, normed],
            rng.choice((4, 8, 8)),
            ns=rng.choice((1, 5)),
            workspace=rng.choice((0, 3)),
        )
        made.append(last)
    out = b.op("out", [last], 1)
    dy = b.tangent("dy", 1)
    for n, v in enumerate(reversed(made)):
        (dy,) = b.op(f"b{n}", [dy, v], 1, phase="backward", workspace=rng.choice((0, 0, 6)))
    (dy,) = b.op("c", [dy], 1, phase="backward", workspace=rng.choice((0, 4, 10)))
    return b.problem(out, [dy])


def any_order_bound(problem: Problem) -> int:
    """From every row that holds in any order of recomputation."""
    assert problem.budget_bytes is not None
    merged = merge(reduce(problem))
    stages, units = range(len(merged.core.stages)), range(len(merged.core.units))
    everywhere = {(u, t) for t in stages for u in units}
    f = build(problem, merged, Refined(every_stage(merged.core), any_order=everywhere))
    result = f.model.solve(gap=0.0)
    assert result.values is not None
    return f.floor_ns(result.bound)


@pytest.mark.parametrize(
    ("layers", "seeds"),
    [
        (in_groups, range(50)),
        (in_ties, range(50)),
        *(pytest.param(in_groups, range(n, n + 50), marks=pytest.mark.slow) for n in (50, 100, 150)),
        pytest.param(in_ties, range(50, 100), marks=pytest.mark.slow),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),  # a function's str has its address
)
def test_what_is_made_for_one_reader_alone_merges_where_no_plan_gains_by_keeping_it(
    layers: Callable[[int], Problem], seeds: range
) -> None:
    """A small block can be worth saving by itself; and not all parts need run where one does."""
    merges = recomputed = 0
    for asked, least_ns in with_optima(map(layers, seeds)):
        merged = merge(reduce(asked, pauses=1))
        found = search(asked, merged, complete(merged.core), 0.0, Deadline.after(60)).best
        assert found is None or found.plan.cost_ns == least_ns
        assert any_order_bound(asked) <= least_ns
        merges += any(len(parts) > 1 for parts in merged.parts)
        recomputed += least_ns > 0
    assert merges > 50 and recomputed > 50


def test_where_a_merged_unit_runs_its_lead_surely_does() -> None:
    b = Builder()
    x = b.input("x")
    (first,) = b.op("first", [x], 8, workspace=6)
    (beside,) = b.op("beside", [x], 4, workspace=20)
    (then,) = b.op("then", [first], 8, workspace=1)
    (end,) = b.op("end", [then, beside], 2)
    out = b.op("out", [end], 1)
    (dx,) = b.op("end_bw", [b.tangent("dy", 1), end], 1, phase="backward")
    merged = merge(reduce(b.problem(out, [dx])))
    assert merged.parts[0] == (0, 1, 2, 3) and merged.lead[0] == 0
    assert merged.lead_bytes(0) == 8 + 6


def residual(
    norm_bytes: int, sum_bytes: int, workspace: tuple[int, int] = (0, 0), twice: bool = False
) -> Merged:
    """x + norm(inner(x)), where backward reads what inner makes, and the sum."""
    b = Builder()
    x = b.input("x")
    (first,) = b.op("first", [x], 8)
    (inner,) = b.op("inner", [first], 8)
    (norm,) = b.op("norm", [inner], norm_bytes, workspace=workspace[0])
    (total,) = b.op("sum", [first, norm], sum_bytes, workspace=workspace[1])
    out = b.op("out", [total, norm] if twice else [total], 1)
    dy = b.tangent("dy", 1)
    for n, v in enumerate((total, inner, first)):
        (dy,) = b.op(f"b{n}", [dy, v], 1, phase="backward")
    return merge(reduce(b.problem(out, [dy])))


def test_a_branch_that_ends_in_a_block_no_smaller_is_one_with_the_sum() -> None:
    tied = residual(8, 8)
    assert (2, 3) in tied.parts
    u = tied.parts.index((2, 3))
    assert tied.lead[u] == 3  # norm can run earlier in a plan, the sum can't


@pytest.mark.parametrize(
    ("norm_bytes", "sum_bytes", "workspace", "twice"),
    [
        (4, 4, (0, 5), False),  # norm's result is smaller than what it reads
        (8, 9, (0, 0), False),  # smaller than the sum
        (8, 8, (1, 0), False),  # norm needs more than the sum
        (8, 8, (0, 0), True),
    ],
)
def test_not_where_the_block_is_worth_keeping_or_making_it_needs_more(
    norm_bytes: int, sum_bytes: int, workspace: tuple[int, int], twice: bool
) -> None:
    assert (2, 3) not in residual(norm_bytes, sum_bytes, workspace, twice).parts


def test_of_a_sum_of_two_branches_one_needs_no_more_than_the_sum_alone() -> None:
    """Both branches end in a block that only the sum reads; the second needs 8 bytes beside the first's."""
    b = Builder()
    x = b.input("x")
    (one,), (two,) = b.op("one", [x], 8), b.op("two", [x], 8)
    (left,) = b.op("left", [one], 8)
    (right,) = b.op("right", [two], 8, workspace=8)
    (total,) = b.op("sum", [left, right], 8)
    out = b.op("out", [total], 1)
    dy = b.tangent("dy", 1)
    for n, v in enumerate((total, two, one)):
        (dy,) = b.op(f"b{n}", [dy, v], 1, phase="backward")
    assert merge(reduce(b.problem(out, [dy]))).parts == ((0,), (1,), (3,), (2, 4), (5,))


def room(problem: Problem) -> int:
    assert problem.budget_bytes is not None
    return problem.budget_bytes - problem.base_bytes


@pytest.fixture
def half_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FEW", 0)
    monkeypatch.setattr(merging, "SMALL", 0.5)


@pytest.fixture
def left_out(half_is_small: None, monkeypatch: pytest.MonkeyPatch) -> list[Merged]:
    """What the solver made of each problem that it took for a large one."""
    seen: list[Merged] = []

    def merging_and_telling(full: Core, most_bytes: int = 0) -> Merged:
        seen.append(merge(full, most_bytes))
        return seen[-1]

    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    monkeypatch.setattr(solver, "merge", merging_and_telling)
    return seen


def test_what_is_small_leaves_the_bound_a_bound(left_out: list[Merged]) -> None:
    """Blocks that are always saved count nothing for the bound, and all that they take for the plan."""
    for asked, least_ns in with_optima(map(random_problem, range(200))):
        if (plan := solved(asked)) is not None:
            assert plan.bound_ns <= least_ns <= plan.cost_ns
    assert sum(any(m.full.block_bytes[b] for b in m.small) for m in left_out) > 50


@pytest.mark.usefixtures("half_is_small")
def test_the_bound_of_the_search_counts_nothing_for_what_is_small() -> None:
    """The search's own bound, which no plan's cost has cut: with the small blocks' bytes it is too high."""
    below = 0
    for asked, least_ns in with_optima(map(random_problem, range(200))):
        merged = merge(reduce(asked), room(asked))
        found = search(asked, merged, Refined(tightest(merged.core)), 0.0, Deadline.after(10))
        assert found.bound_ns <= least_ns
        below += bool(merged.small_bytes) and found.bound_ns < least_ns
    assert below > 20


@pytest.mark.usefixtures("half_is_small")
@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 200, 50)], ids=str)
def test_a_plan_that_fits_fits_when_small_blocks_are_counted(seeds: range) -> None:
    """All that is decided about stays as it is: the rows that hold in any order are met, to the last byte."""
    counted = 0
    for seed in seeds:
        problem = random_problem(seed)
        for budget in budgets(problem):
            asked = problem.with_budget(budget)
            merged = merge(reduce(asked), room(asked))
            written = drop(asked, merged)
            if written is None:
                continue
            asked = asked.with_budget(written.plan.peak_bytes)
            f = build(asked, merged.counted(), Refined(every_stage(merged.core)))
            said = encode(f, written.draft)
            assert f.model.solve(gap=0.0, fixed={x: v for x, (_, v) in said.items()}).values is not None
            counted += merged.counted() is not merged
    assert counted > 20


@settings(max_examples=40)
@given(problems(ops=12))
def test_a_plan_can_be_said_of_another_core(problem: Problem) -> None:
    whole = unmerged(reduce(problem))
    for budget in budgets(problem):
        written = drop(problem.with_budget(budget), whole)
        if written is not None:
            for merged in (whole, merge(whole.core), merge(whole.core, 100 * budget)):
                validate(problem, restated(problem, merged, written).plan)
            assert restated(problem, whole, written).plan.cost_ns == written.plan.cost_ns
