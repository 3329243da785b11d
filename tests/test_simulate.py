"""The judge, judged: peaks worked out by hand, every refusal, and a recount by another method."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematc.baselines import recompute_all
from rematc.errors import BudgetError, PlanError, ProblemError
from rematc.graph import Graph, Op, Value
from rematc.plan import Plan
from rematc.problem import OpCost, Problem
from rematc.schedule import just_in_time
from rematc.simulate import judged, simulate, validate
from rematc.solve import solve
from tests import oracle
from tests.graphs import Builder, budgets, chain, problems, random_problem, read_by_backward, skip
from tests.recount import recount

# chain(4), by index: values x a1 a2 a3 a4 dy4 dy3 dy2 dy1 dy0, ops f1 f2 f3 f4 b4 b3 b2 b1.
CHAIN = chain(4)


def peak(problem: Problem, saved: tuple[int, ...], backward: tuple[int, ...]) -> int:
    return simulate(problem, Plan(saved, backward)).peak_bytes


def save_all(problem: Problem) -> Plan:
    saved = read_by_backward(problem)
    return Plan(saved, just_in_time(problem.graph, saved))


def test_every_step_of_a_chain_by_hand() -> None:
    profile = simulate(CHAIN, Plan((1, 2, 3), (4, 5, 6, 7)))
    # a1, +a2, +a3, +a4 | a1 to a4 and dy3, then one a less and one dy more | a4 and dy0
    assert profile.live_bytes == (1, 2, 3, 4, 5, 5, 4, 3)
    assert (profile.end_bytes, profile.peak_bytes, profile.recompute_ns) == (2, 5, 0)
    assert profile.peak_name(CHAIN.graph) == "b4"
    assert sorted(profile.at_peak) == [(name, 1) for name in ("b4.0", "f1.0", "f2.0", "f3.0", "f4.0")]


def test_recomputing_one_value_takes_its_byte_off_the_peak() -> None:
    profile = simulate(CHAIN, Plan((2, 3), (4, 5, 0, 6, 7)))
    assert profile.live_bytes == (1, 2, 2, 3, 4, 4, 3, 4, 3)
    assert profile.recompute_ns == 1


@pytest.mark.parametrize(("budget", "cost"), [(5, 0), (4, 1), (3, None)])
def test_the_cheapest_plan_of_a_chain_by_hand(budget: int, cost: int | None) -> None:
    found = oracle.search(CHAIN.with_budget(budget))
    assert (found and found.cost_ns) == cost
    assert oracle.minimum_peak(CHAIN) == 4


def test_a_budget_of_one_byte_less_is_refused() -> None:
    plan = judged(CHAIN, Plan((1, 2, 3), (4, 5, 6, 7)))
    assert validate(CHAIN.with_budget(5), plan).peak_bytes == 5
    with pytest.raises(PlanError, match="peaks at 5 bytes at 'b4', over the budget of 4"):
        validate(CHAIN.with_budget(4), plan)


def test_resident_workspace_and_epilogue_add_up() -> None:
    b = Builder()
    x = b.input("x", 100)
    (a,) = b.op("f", [x], 8, workspace=20)
    dy = b.tangent("dy", 4, held=True)
    (dx,) = b.op("h", [a, dy], 2, phase="backward", workspace=3)
    profile = simulate(b.problem([], [dx], resident=1000, epilogue=50), Plan((a,), (1,)))
    assert profile.live_bytes == (1028, 1000 + 8 + 4 + 2 + 3)
    assert (profile.end_bytes, profile.peak_bytes) == (1000 + 4 + 2 + 50, 1056)
    assert profile.peak_step == 2


@pytest.mark.parametrize(("meanwhile", "peak", "where"), [(1, 4, "b4"), (3, 6, "what runs between forward")])
def test_what_is_taken_between_the_passes_stands_on_what_is_kept(
    meanwhile: int, peak: int, where: str
) -> None:
    problem = replace(CHAIN, meanwhile_bytes=meanwhile)
    profile = simulate(problem, Plan((2, 3), (4, 5, 0, 6, 7)))  # keeps a2, a3 and the output
    assert (profile.between_bytes, profile.peak_bytes) == (3 + meanwhile, peak)
    assert profile.peak_name(problem.graph).startswith(where)
    if peak == 6:
        kept = {("f2.0", 1), ("f3.0", 1), ("f4.0", 1)}
        assert set(profile.at_peak) == {("what is taken outside of the graph", 3), *kept}


def test_without_a_backward_pass_it_is_taken_at_the_end_and_not_without_passes() -> None:
    graph = Graph((8, 8), (Value("x", 0), Value("y", 1)), (Op("f", "exp", (0,), (1,)),), (0,), outputs=(1,))
    problem = Problem(graph, (OpCost(5),), resident_bytes=8, meanwhile_bytes=3)
    assert simulate(problem, Plan((), ())).peak_bytes == 19
    with pytest.raises(BudgetError) as refused:
        solve(problem, budget_bytes=18)
    assert refused.value.minimum_bytes == solve(problem, budget_bytes=19).peak_bytes == 19
    general = replace(graph, outputs=(), gradients=(1,))
    with pytest.raises(ProblemError, match="there are none"):
        Problem(general, (OpCost(5),), meanwhile_bytes=1)


def test_views_share_their_storage() -> None:
    b = Builder()
    (a,) = b.op("f", [b.input("x")], 8)
    (v,) = b.op("view", [a], view_of=a, ns=0)
    (y,) = b.op("g", [v], 1)
    (dx,) = b.op("h", [a, v, b.tangent("dy")], 1, phase="backward")
    problem = b.problem([y], [dx])
    assert peak(problem, (a, v), (3,)) == peak(problem, (a,), (1, 3)) == 8 + 1 + 1


def test_a_view_of_an_input_costs_nothing_even_when_it_is_made_again() -> None:
    b = Builder()
    x = b.input("x", 64)
    (v,) = b.op("view", [x], view_of=x, ns=0)
    (y,) = b.op("g", [v], 1)
    (dx,) = b.op("h", [v, b.tangent("dy")], 1, phase="backward")
    problem = b.problem([y], [dx])
    assert peak(problem, (v,), (2,)) == peak(problem, (), (0, 2)) == 2


def test_an_output_that_is_a_view_keeps_the_whole_storage() -> None:
    b = Builder()
    (a,) = b.op("f", [b.input("x")], 8)
    (v,) = b.op("view", [a], view_of=a)
    (dx,) = b.op("h", [b.tangent("dy")], 1, phase="backward")
    problem = b.problem([v], [dx])
    assert simulate(problem, Plan((), (2,))).end_bytes == 9
    assert peak(problem, (a,), (2,)) == 9  # saving what the output holds is free


def test_recomputing_an_output_takes_memory_of_its_own() -> None:
    b = Builder()
    (y,) = b.op("f", [b.input("x")], 8)
    (dx,) = b.op("h", [y, b.tangent("dy")], 1, phase="backward")
    problem = b.problem([y], [dx])
    assert peak(problem, (y,), (1,)) == 9
    assert peak(problem, (), (0, 1)) == 17


def test_a_saved_view_and_its_recomputed_base_are_two_pieces() -> None:
    b = Builder()
    (a,) = b.op("f", [b.input("x")], 8)
    (v,) = b.op("view", [a], view_of=a, ns=0)
    (dx,) = b.op("h", [a, v, b.tangent("dy")], 0, phase="backward")
    assert peak(b.problem([], [dx]), (v,), (0, 2)) == 16


def test_all_outputs_of_an_op_are_allocated_even_those_nobody_reads() -> None:
    b = Builder()
    a, _unread = b.op("split", [b.input("x")], 8, 5)
    (dx,) = b.op("h", [a, b.tangent("dy")], 1, phase="backward")
    profile = simulate(b.problem([], [dx]), Plan((), (0, 1)))
    assert profile.live_bytes == (13, 9)
    assert profile.recompute_ns == 0  # nothing in forward needs it: this is its first run


@pytest.mark.parametrize(("held", "live", "end"), [(True, (13, 33, 34), 34), (False, (13, 33, 31), 31)])
def test_gradients_stay_to_the_end_and_tangents_if_they_are_held(
    held: bool, live: tuple[int, ...], end: int
) -> None:
    b = Builder()
    dy = b.tangent("dy", 3, held=held)
    (first,) = b.op("b1", [dy], 10, phase="backward")
    (second,) = b.op("b2", [dy], 20, phase="backward")
    (third,) = b.op("b3", [second], 1, phase="backward")
    profile = simulate(b.problem([], [first, second, third]), Plan((), (0, 1, 2)))
    assert (profile.live_bytes, profile.end_bytes) == (live, end)


def test_a_backward_op_that_no_gradient_needs_does_not_run() -> None:
    b = Builder()
    dy = b.tangent("dy")
    b.op("unread", [dy], 100, phase="backward")
    (dx,) = b.op("b", [dy], 1, phase="backward")
    assert peak(b.problem([], [dx]), (), (1,)) == 1


def test_backward_ops_run_in_any_order_in_which_each_finds_what_it_reads() -> None:
    b = Builder()
    dy = b.tangent("dy", 5)
    (dw,) = b.op("dw", [dy], 10, phase="backward")
    (da,) = b.op("da", [dy], 2, phase="backward")
    (dx,) = b.op("dx", [da], 1, phase="backward")
    problem = b.problem([], [dw, dx])
    assert simulate(problem, Plan((), (0, 1, 2))).live_bytes == (15, 17, 13)
    assert simulate(problem, Plan((), (1, 2, 0))).live_bytes == (7, 8, 16)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_saving_everything_runs_and_recomputes_nothing(problem: Problem) -> None:
    plan = save_all(problem)
    profile = simulate(problem, plan)
    assert profile.recompute_ns == 0
    assert profile.peak_bytes == recount(problem, plan)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 4))
def test_the_cheapest_plan_is_valid_and_a_recount_agrees(problem: Problem, which: int) -> None:
    tried = budgets(problem)
    asked = problem.with_budget(tried[min(which, len(tried) - 1)])
    found = oracle.search(asked)
    assert found is not None
    plan = judged(asked, found.plan)
    profile = validate(asked, plan)
    assert profile.recompute_ns == found.cost_ns
    assert profile.peak_bytes == recount(asked, plan)
    assert oracle.search(problem.with_budget(tried[0] - 1)) is None


def test_the_random_problems_have_what_real_graphs_have() -> None:
    ops = [op for seed in range(200) for op in random_problem(seed).graph.ops]
    assert {None, "random", "mutates"} == {op.pin for op in ops}
    assert any(len(op.outputs) > 1 for op in ops)
    assert sum(len(budgets(random_problem(seed))) > 1 for seed in range(100)) > 30


def test_less_memory_costs_more() -> None:
    problem = skip(3)
    found = [oracle.search(problem.with_budget(b)) for b in (48, 49, 51)]
    assert [f and f.cost_ns for f in found] == [4, 2, 0]
    assert oracle.search(problem.with_budget(47)) is None


def test_a_bound_of_other_costs_is_dropped() -> None:
    problem = chain(6, ns=100)
    plan = recompute_all(problem)
    dearer = replace(plan, bound_ns=plan.cost_ns + 1, status="optimal")
    assert (judged(problem, dearer).bound_ns, judged(problem, dearer).status) == (0, "feasible")
    validate(problem, judged(problem, dearer))
    assert judged(problem, replace(plan, bound_ns=plan.cost_ns)).bound_ns == plan.cost_ns


def test_what_is_a_view() -> None:
    """All that it makes is on one storage that it reads, and of no other memory does it need anything."""
    b = Builder()
    x = b.input("x", 8)
    (a,) = b.op("a", [x], 8)
    (c,) = b.op("c", [x], 8)
    (size,) = b.op("size", [x], 0)
    b.op("view", [a, size], view_of=a)
    b.op("view_beside", [a, c], view_of=a)
    b.op("of_parameter", [x], view_of=x)
    b.op("of_parameter_beside", [x, a], view_of=x)
    b.op("pinned", [a], view_of=a, pin="random")
    several, mixed = (b.op(name, [a, c], 8, 8) for name in ("several", "mixed"))
    for made, storages in ((several, (a, c)), (mixed, (a, x))):
        for v, on in zip(made, storages, strict=True):
            b.values[v] = Value(f"{v}", b.values[on].storage)
    graph = b.problem([a], []).graph
    assert {graph.ops[i].name for i in graph.views} == {"view", "of_parameter"}
