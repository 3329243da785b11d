"""What the code of one plan says of the next, of hidden needs of ops and of the code of real models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rematc
from rematc.baselines import min_cut, recompute_all, save_all
from rematc.errors import BudgetError, ProblemError
from rematc.fit import fit
from rematc.graph import Graph
from rematc.learn import Knowledge, OpNeed, most_seen, over_graph, said_of
from rematc.options import SolveOptions
from rematc.peak import PeakOfCode
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
            need = OpNeed(is_, is_ - says)
            found[step.op] = max(need, found.get(step.op, need))
        return found


def hidden_chain(budget_bytes: int, sizes: Mapping[int, int]) -> Hidden:
    """A chain of 12 layers, none like another."""
    problem = graphs.each_of_its_kind(graphs.chain(12)).with_budget(budget_bytes)
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


def wide_gradients() -> Hidden:
    """A chain of 6 layers whose gradients are the largest: each is written over the one before."""
    b = graphs.Builder()
    a = [b.input("x")]
    for i in range(6):
        a += b.op(f"f{i}", [a[-1]], 1, target=f"f{i}")
    dy = b.tangent("dy", 4)
    for i in reversed(range(6)):
        (dy,) = b.op(f"b{i}", [a[i], dy], 4, phase="backward", target=f"b{i}")
    problem = b.problem([a[-1]], [dy])
    return Hidden(problem, with_workspace(problem, {i: -4 for i in range(6, 12)}))


def wide_inside() -> Hidden:
    """Six layers that are wide inside, as a softmax of scores is, which writes over them."""
    b = graphs.Builder()
    a, wide = [b.input("x")], []
    for i in range(6):
        (scores,) = b.op(f"scores{i}", [a[-1]], 4, target="scores")
        wide += b.op(f"softmax{i}", [scores], 4, target="softmax")
        a += b.op(f"out{i}", [wide[-1]], 1, target="out")
    dy = b.tangent("dy", 1)
    for i in reversed(range(6)):
        (dy,) = b.op(f"b{i}", [a[i], wide[i], dy], 1, phase="backward", target="back")
    problem = b.problem([a[-1]], [dy])
    return Hidden(problem, with_workspace(problem, {3 * i + 1: -4 for i in range(6)}))


@pytest.mark.parametrize("make", [wide_gradients, wide_inside])
def test_a_plan_is_found_where_only_writing_in_place_makes_it_fit(make: Callable[[], Hidden]) -> None:
    code, smallest = make(), []
    for problem in (code.problem, code.truth):
        with pytest.raises(BudgetError) as refused:
            solve(problem, OPTIONS, budget_bytes=1)
        smallest.append(refused.value.minimum_bytes)
    assert smallest[1] < smallest[0]
    limited = code.problem.with_budget(smallest[1])
    found = fit(limited, OPTIONS, code, None, code.of_ops)
    assert found.plan.peak_bytes == code(found.plan) <= smallest[1]
    with pytest.raises(BudgetError) as refused:
        fit(limited.with_budget(smallest[1] - 1), OPTIONS, code, None, code.of_ops)
    assert refused.value.minimum_bytes == code(refused.value.plan)


def test_where_code_needs_less_than_is_known_ops_that_are_alike_are_thought_to_write_in_place() -> None:
    """A BERT was left a plan of thirty forward passes: all code was thought to need less, and did not."""
    code = wide_inside()
    with pytest.raises(BudgetError) as refused:
        solve(code.problem, OPTIONS, budget_bytes=1)
    plan = refused.value.plan
    assert code(plan) < simulate(code.problem, plan).peak_bytes
    knows = Knowledge(code.problem)
    knows.learn(replace(plan, peak_bytes=code(plan)), {1: code.of_ops(plan)[1]})
    assert knows.known == code.truth


def test_what_the_code_shows_to_be_wrong_is_not_thought_of_ops_that_are_alike() -> None:
    """Of three softmax, the first writes in place and the last was seen not to: the code peaks there."""
    code = wide_inside()
    with pytest.raises(BudgetError) as refused:
        solve(code.problem, OPTIONS, budget_bytes=1)
    plan, knows = refused.value.plan, Knowledge(code.problem)
    said = simulate(code.problem, plan).peak_bytes
    knows.learn(replace(plan, peak_bytes=said - 1), {1: OpNeed(said - 4, -4)})
    assert [c.workspace_bytes for c in knows.known.costs[:5]] == [0, -4, 0, 0, 0]
    assert knows.known.lowering_bytes == -1


def test_what_was_learned_stays_within() -> None:
    """Processes that train together pose the same graph: what a plan is for is the same to them."""
    code = hidden_chain(8, {16: 4, 20: -1})
    found = fit(code.problem, OPTIONS, code, None, code.of_ops)
    assert found.problem == replace(code.problem, lowering_bytes=found.problem.lowering_bytes)
    given = fit(code.problem, OPTIONS, code, found.plan, code.of_ops)
    assert given.problem == found.problem and given.plan.digest == found.plan.digest


@given(graphs.problems(), st.integers(0, 10**6), st.floats(0, 1))
def test_whatever_ops_need_what_is_accepted_fits_and_what_is_refused_names_a_plan(
    problem: Problem, seed: int, share: float
) -> None:
    rng = random.Random(seed)
    sizes = {i: rng.choice([0, 0, 1, 4, -problem.graph.made_bytes(i)]) for i in range(len(problem.graph.ops))}
    least = [-problem.graph.made_bytes(i) for i in range(len(problem.costs))]
    more = {i: max(least[i], c.workspace_bytes + sizes[i]) for i, c in enumerate(problem.costs)}
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


def test_alike_ops_need_alike_and_the_most_that_was_seen_stays() -> None:
    """The first op of the chain reads what is resident, which has no bytes: it is like no other."""
    problem = graphs.chain(3)
    over, fits = OpNeed(5, 2), OpNeed(2, 0)
    first = most_seen(problem, {}, {0: fits, 1: over}, 3)
    assert first == {0: 0, 1: 2, 2: 2}
    assert most_seen(problem, {}, {1: over, 2: OpNeed(3, 1)}, 3) == {1: 2, 2: 1}
    assert most_seen(problem, {}, {4: over, 3: OpNeed(3, -1)}, 3) == {3: -1, 4: 2}
    second = most_seen(problem, first, {1: OpNeed(6, 1), 4: OpNeed(3, -1)}, 3)
    assert second == {0: 0, 1: 2, 2: 2, 4: -1}
    third = most_seen(problem, second, {4: OpNeed(3, 0)}, 3)
    assert third == {0: 0, 1: 2, 2: 2, 4: 0}
    assert most_seen(problem, third, {4: OpNeed(3, -9)}, 3) == third


def test_only_what_breaks_the_limit_is_blamed() -> None:
    """What a fused kernel has all at once depends on the plan: where it does no harm it is not counted."""
    problem, needs = graphs.chain(3), {3: OpNeed(9, 4)}
    assert most_seen(problem, {}, needs, 8) == {3: 4}
    assert most_seen(problem, {}, needs, 9) == {3: 0}


def test_no_more_is_written_in_place_than_is_made() -> None:
    assert most_seen(graphs.chain(3), {}, {0: OpNeed(1, -1), 3: OpNeed(1, -7)}, 3) == {0: -1, 3: -1}


def test_what_is_said_of_ops_comes_on_top() -> None:
    problem = graphs.chain(1)
    problem = replace(problem, costs=(OpCost(1, 3), OpCost(1, 2)))
    assert said_of(problem, {0: 4, 1: -3}).costs == (OpCost(1, 7), OpCost(1, -1))


def test_an_op_may_take_less_than_nothing_and_no_less_than_it_makes() -> None:
    graph: Graph = graphs.chain(1).graph
    Problem(graph, (OpCost(1, -1), OpCost(1, -1)))
    for i, costs in enumerate(((OpCost(1, -2), OpCost(1)), (OpCost(1), OpCost(1, -2)))):
        with pytest.raises(ProblemError, match=f"op {i}: 'workspace_bytes' must be at least -1, and is -2"):
            Problem(graph, costs)


@pytest.mark.parametrize("exact_ops", [0, solver.EXACT_OPS])
def test_plans_and_bounds_hold_where_ops_write_in_place(
    exact_ops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exhaustive search knows what is cheapest."""
    monkeypatch.setattr(solver, "EXACT_OPS", exact_ops)
    monkeypatch.setattr(solver, "best_order", lambda problem, _: problem.graph.backward_steps)
    tried = [graphs.in_place(graphs.random_problem(seed), seed) for seed in range(40)]
    for asked, least_ns in graphs.with_optima(tried):
        plan = solve(asked)
        assert simulate(asked, plan).peak_bytes == plan.peak_bytes <= asked.budget_bytes
        assert plan.bound_ns <= least_ns <= plan.cost_ns
        assert not exact_ops or plan.cost_ns == least_ns


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fn", REHEARSED, ids=lambda fn: fn.__name__)
def test_what_ops_of_real_code_need_is_all_that_it_needs(fn: Callable[..., Any]) -> None:
    """Each kernel's memory is said of an op that it computes, and with it the plan's peak is the code's."""
    peak = peak_of(fn, *REHEARSED[fn])
    views = peak.problem.graph.views
    for plan_of in (min_cut, recompute_all):
        plan = plan_of(peak.problem)
        needs, needed = peak.of_ops(plan), peak(plan)
        most = max(need.alive_bytes for need in needs.values())
        assert 0.8 * needed <= most <= needed  # the ends of the passes are of no op
        ran = {step.op for step in simulate(peak.problem, plan).steps} - views
        assert ran >= set(needs) and len(needs) > 0.6 * len(ran)
        limit = simulate(peak.problem, plan).peak_bytes
        told = said_of(peak.problem, most_seen(peak.problem, {}, needs, limit))
        assert abs(over_graph(told, plan, needed)) <= 0.1 * needed


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_s_plans_are_judged_with_what_its_ops_need(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    asked, of_ops = list[dict[int, OpNeed]](), PeakOfCode.of_ops

    def spied(peak: PeakOfCode, plan: Plan) -> dict[int, OpNeed]:
        asked.append(of_ops(peak, plan))
        return asked[-1]

    monkeypatch.setattr(PeakOfCode, "of_ops", spied)
    with pytest.raises(BudgetError):
        torch.compile(model, backend=rematc.backend(1))(torch.randn(256, 16))
    assert asked and all(asked)
