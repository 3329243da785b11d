"""What the code of one plan says of the next, of hidden needs of ops and of the code of real models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematc.baselines import min_cut, recompute_all, save_all
from rematc.errors import BudgetError, ProblemError
from rematc.fit import fit
from rematc.graph import Graph
from rematc.kernels import made_bytes
from rematc.learn import OpNeed, learned
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import OpCost, Problem
from rematc.simulate import simulate, validate
from rematc.solve import solve, solver
from tests import graphs
from tests.test_kernels import REHEARSED, peak_of

OPTIONS = SolveOptions(time_limit_s=1)


def with_workspace(problem: Problem, sizes: Mapping[int, int]) -> Problem:
    """``problem`` with that much workspace for the ops at these places."""
    costs = [replace(c, workspace_bytes=sizes.get(i, 0)) for i, c in enumerate(problem.costs)]
    return replace(problem, costs=tuple(costs))


class Hidden:
    """A compiler whose code needs what ``truth`` says; it tells of each op."""

    def __init__(self, problem: Problem, truth: Problem) -> None:
        self.problem, self.truth = problem, truth
        self.lowered = 0

    def __call__(self, plan: Plan) -> int:
        self.lowered += 1
        return simulate(self.truth, plan).peak_bytes

    def of_ops(self, plan: Plan) -> dict[int, OpNeed]:
        found = dict[int, OpNeed]()
        said, true = (simulate(p, plan) for p in (self.problem, self.truth))
        for step, says, is_ in zip(said.steps, said.live_bytes, true.live_bytes, strict=True):
            old = found.get(step.op, OpNeed(0, is_ - says))
            found[step.op] = OpNeed(max(is_, old.alive_bytes), max(is_ - says, old.more_bytes))
        return found


def hidden_chain(budget_bytes: int, sizes: Mapping[int, int]) -> Hidden:
    """A chain of 12 layers with one target and cost for each, so that none is like another."""
    problem = graphs.chain(12).with_budget(budget_bytes)
    ops = tuple(replace(op, target=op.name) for op in problem.graph.ops)
    problem = replace(problem, graph=replace(problem.graph, ops=ops))
    return Hidden(problem, with_workspace(problem, sizes))


@pytest.mark.parametrize(("budget_bytes", "op", "size"), [(8, 16, 4), (9, 18, 5), (9, 14, 5)])
def test_what_one_op_needs_is_not_taken_from_all_the_others(budget_bytes: int, op: int, size: int) -> None:
    """A U-Net took 4.9 forward passes, as one convolution copies its weights: all had to do with less."""
    code = hidden_chain(budget_bytes, {op: size})
    best = solve(code.truth, OPTIONS)
    found = fit(code.problem, OPTIONS, code, None, code.of_ops)
    assert (found.plan.cost_ns, code.lowered) == (best.cost_ns, 2)
    assert found.plan.peak_bytes == code(found.plan) <= budget_bytes
    assert fit(code.problem, OPTIONS, code).plan.cost_ns > 3 * best.cost_ns  # where nobody tells of which


@pytest.mark.parametrize("ops", [range(12, 24), range(17, 24), range(12, 17)], ids=["all", "late", "early"])
@pytest.mark.parametrize("budget_bytes", [4, 5, 6])
def test_what_a_backward_op_writes_in_place_is_used(budget_bytes: int, ops: range) -> None:
    """Also where the code fills the budget elsewhere: what the graph says had held the plan up."""
    code = hidden_chain(budget_bytes, dict.fromkeys(ops, -1))
    found = fit(code.problem, OPTIONS, code, None, code.of_ops)
    assert found.plan.peak_bytes == code(found.plan) <= budget_bytes
    assert found.plan.cost_ns == solve(code.truth, OPTIONS).cost_ns < solve(code.problem, OPTIONS).cost_ns


def test_a_plan_is_found_where_only_writing_in_place_makes_it_fit() -> None:
    code = hidden_chain(1, {i: -1 for i in range(12, 24)})
    least = [pytest.raises(BudgetError) for _ in range(2)]
    for problem, refused in zip((code.problem, code.truth), least, strict=True):
        with refused:
            solve(problem, OPTIONS)
    with pytest.raises(BudgetError) as refused_by_code:
        fit(code.problem, OPTIONS, code, None, code.of_ops)
    assert refused_by_code.value.minimum_bytes == code(refused_by_code.value.plan)


@given(graphs.problems(), st.integers(0, 10**6), st.floats(0, 1))
def test_whatever_ops_need_what_is_accepted_fits_and_what_is_refused_names_a_plan(
    problem: Problem, seed: int, share: float
) -> None:
    rng = random.Random(seed)
    sizes = {
        i: rng.choice([0, 0, 1, 4, -made_bytes(problem.graph, i) if op.phase == "backward" else 2])
        for i, op in enumerate(problem.graph.ops)
    }
    more = {i: c.workspace_bytes + sizes[i] for i, c in enumerate(problem.costs)}
    high = max(simulate(p, save_all(p)).peak_bytes for p in (problem, with_workspace(problem, more)))
    limited = problem.with_budget(max(1, int(share * high)))
    code = Hidden(limited, with_workspace(limited, more))
    try:
        found = fit(limited, OPTIONS, code, None, code.of_ops)
    except BudgetError as e:
        limited = problem.with_budget(e.minimum_bytes)
        found = fit(limited, OPTIONS, code, e.plan, code.of_ops)
    assert found.plan.peak_bytes == code(found.plan) <= (limited.budget_bytes or 0)
    assert found.plan.bound_ns <= found.plan.cost_ns
    validate(found.problem, found.plan)


def costs_of(told: Problem) -> list[int]:
    return [cost.workspace_bytes for cost in told.costs]


def test_alike_ops_need_alike_and_what_was_seen_stays() -> None:
    problem = graphs.chain(3).with_budget(3)
    plan = save_all(problem)
    over, fits = OpNeed(5, 2), OpNeed(2, 0)
    first = learned(problem, problem, plan, {0: fits, 1: over}, 5)
    assert costs_of(first) == [0, 2, 2, 0, 0, 0]  # the first reads what is resident, which has no bytes
    assert costs_of(learned(problem, problem, plan, {1: over, 2: OpNeed(3, 1)}, 5)) == [0, 2, 1, 0, 0, 0]
    assert costs_of(learned(problem, problem, plan, {4: over, 3: OpNeed(3, -1)}, 5)) == [0, 0, 0, -1, 2, 0]
    second = learned(problem, first, plan, {1: OpNeed(6, 1), 4: OpNeed(3, -1)}, 6)
    assert costs_of(second) == [0, 2, 2, 0, -1, 0]
    third = learned(problem, second, plan, {4: OpNeed(3, -9)}, 3)
    assert costs_of(third) == [0, 2, 2, 0, -1, 0]
    assert costs_of(learned(problem, third, plan, {4: OpNeed(3, 0)}, 3)) == [0, 2, 2, 0, 0, 0]


def test_only_what_breaks_the_budget_is_blamed() -> None:
    """What a fused kernel has all at once depends on the plan: where it does no harm it is not counted."""
    problem, needs = graphs.chain(3), {3: OpNeed(9, 4)}
    plan = save_all(problem)
    assert costs_of(learned(problem.with_budget(8), problem.with_budget(8), plan, needs, 9))[3] == 4
    assert costs_of(learned(problem.with_budget(9), problem.with_budget(9), plan, needs, 9))[3] == 0


def test_no_more_is_written_in_place_than_is_made() -> None:
    problem = graphs.chain(3).with_budget(3)
    told = learned(problem, problem, save_all(problem), {0: OpNeed(1, -1), 3: OpNeed(1, -7)}, 4)
    assert costs_of(told) == [0, 0, 0, -1, 0, 0]


def test_only_a_backward_op_may_take_less_than_nothing() -> None:
    graph: Graph = graphs.chain(1).graph
    Problem(graph, (OpCost(1), OpCost(1, -1)))
    with pytest.raises(ProblemError, match="op 0: 'workspace_bytes' must be at least zero, and is -1"):
        Problem(graph, (OpCost(1, -1), OpCost(1)))


def in_place(problem: Problem, seed: int) -> Problem:
    """``problem``, but some backward ops write some of what they make over what they read."""
    rng = random.Random(seed)
    backward = [i for i in problem.graph.backward if rng.random() < 0.6]
    return with_workspace(problem, {i: -rng.randint(0, made_bytes(problem.graph, i)) for i in backward})


@pytest.mark.parametrize("exact_ops", [0, solver.EXACT_OPS])
def test_plans_and_bounds_hold_where_ops_write_in_place(
    exact_ops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exhaustive search knows what is cheapest."""
    monkeypatch.setattr(solver, "EXACT_OPS", exact_ops)
    monkeypatch.setattr(solver, "best_order", lambda problem, _: problem.graph.backward_steps)
    tried = [in_place(graphs.random_problem(seed), seed) for seed in range(40)]
    for asked, least_ns in graphs.with_optima(tried):
        plan = solve(asked)
        assert simulate(asked, plan).peak_bytes == plan.peak_bytes <= asked.budget_bytes
        assert plan.bound_ns <= least_ns <= plan.cost_ns
        assert not exact_ops or plan.cost_ns == least_ns


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fn", REHEARSED, ids=lambda fn: fn.__name__)
def test_what_is_learned_of_real_code_is_what_it_needs(fn: Callable[..., Any]) -> None:
    peak = peak_of(fn, *REHEARSED[fn])
    for plan_of in (min_cut, recompute_all):
        plan = plan_of(peak.problem)
        needs, needed = peak.of_ops(plan), peak(plan)
        told = learned(peak.problem, peak.problem, plan, needs, needed)
        assert needed <= simulate(told, plan).peak_bytes <= 1.05 * needed
        most = max(need.alive_bytes for need in needs.values())
        assert 0.9 * needed <= most <= needed  # the ends of the passes are of no op
        said = dict.fromkeys(needs, 0)
        profile = simulate(peak.problem, plan)
        for step, live_bytes in zip(profile.steps, profile.live_bytes, strict=True):
            if step.op in needs:
                said[step.op] = max(said[step.op], live_bytes)
        assert all(needs[i].alive_bytes <= said[i] + max(0, needs[i].more_bytes) for i in needs)
