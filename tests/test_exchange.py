"""Problems as networkx graphs: DAGs of others read as theirs are meant, and ours come back as they were."""

from __future__ import annotations

import json
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematc.errors import BudgetError, ProblemError
from rematc.exchange import from_networkx, to_networkx
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import OpCost, Problem
from rematc.simulate import judged, simulate, validate
from tests import graphs, test_files
from tests.dags import dag_of, peak_by_intervals, random_dag, random_runs
from tests.recount import recount
from tests.test_layering import loaded_by

# --- a general DAG


def test_a_dag_by_hand() -> None:
    problem = from_networkx(dag_of("ab bc cd ad"))
    graph = problem.graph
    assert [(op.name, op.inputs, op.outputs, op.phase) for op in graph.ops] == [
        ("a", (), (0,), "forward"),
        ("b", (0,), (1,), "forward"),
        ("c", (1,), (2,), "forward"),
        ("d", (0, 2), (3,), "forward"),
    ]
    assert (graph.inputs, graph.tangents, graph.outputs, graph.gradients) == ((), (), (), (3,))
    assert problem.budget_bytes is None
    once = simulate(problem, Plan((), (0, 1, 2, 3)))
    assert (once.live_bytes, once.recompute_ns) == ((10, 20, 30, 30), 0)
    twice = simulate(problem, Plan((), (0, 1, 2, 0, 3)))
    assert (twice.live_bytes, twice.recompute_ns) == ((10, 20, 20, 20, 30), 1)


def test_what_all_sinks_make_is_held_to_the_end() -> None:
    profile = simulate(from_networkx(dag_of("ab ac cd")), Plan((), (0, 1, 2, 3)))
    assert profile.live_bytes == (10, 20, 30, 30)  # b stays; a goes after c, c after d
    assert profile.end_bytes == 20


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_any_sequence_needs_what_two_other_counts_say(seed: int, again: int) -> None:
    dag = random_dag(seed)
    problem, runs = from_networkx(dag), random_runs(again, len(dag))
    plan = judged(problem, Plan((), tuple(runs)))
    validate(problem, plan)
    assert plan.peak_bytes == recount(problem, plan) == peak_by_intervals(dag, runs)
    repeats = sum(dag.nodes[i]["runtime_ns"] for i in runs) - sum(ns for _, ns in dag.nodes("runtime_ns"))
    assert plan.cost_ns == repeats


def test_attributes_go_by_any_name() -> None:
    dag = nx.DiGraph()
    dag.add_node("mm", size=8, cost=5, scratch=3, why="random", name="layer.mm", target="aten.mm.default")
    named = from_networkx(dag, bytes="size", runtime_ns="cost", workspace_bytes="scratch", pin="why")
    (op,) = named.graph.ops
    assert (op.name, op.target, op.pin) == ("layer.mm", "aten.mm.default", "random")
    assert (named.graph.storage_bytes, named.costs) == ((8,), (OpCost(5, 3),))


@pytest.mark.parametrize("x", [7, 7.0, np.int32(7), np.uint8(7), np.float32(7), np.float64(7)])
def test_whole_numbers_of_any_type_are_read(x: Any) -> None:
    problem = from_networkx(dag_of("ab", bytes=x, runtime_ns=x, workspace_bytes=x))
    assert (problem.graph.storage_bytes, problem.costs) == ((7, 7), (OpCost(7, 7),) * 2)
    assert Problem.from_json(problem.to_json()) == problem


def test_numbers_beyond_a_float_are_read() -> None:
    assert from_networkx(dag_of("ab", bytes=10**400)).graph.storage_bytes == (10**400,) * 2


def names(problem: Problem) -> str:
    return "".join(op.name for op in problem.graph.ops)


def test_the_order_is_the_one_given_or_close_to_that_of_adding() -> None:
    dag = dag_of("bd ad ce de")  # added in the order b d a c e
    assert names(from_networkx(dag)) == "badce"
    assert names(from_networkx(dag, order=["c", "a", "b", "d", "e"])) == "cabde"
    for node, rank in zip("abcde", (7, 3, 1, 8, 20), strict=True):
        dag.nodes[node]["order"] = dag.nodes[node]["rank"] = rank
    assert names(from_networkx(dag)) == names(from_networkx(dag, order="rank")) == "cbade"


def changed(node: str = "b", **attributes: Any) -> nx.DiGraph:
    dag = dag_of("ab bc")
    dag.add_node(node, **attributes)
    return dag


def ranked(*ranks: int | None) -> nx.DiGraph:
    dag = dag_of("ab bc")
    for node, rank in zip("abc", ranks, strict=True):
        dag.nodes[node].update({} if rank is None else {"order": rank})
    return dag


@pytest.mark.parametrize(
    ("dag", "how", "told"),
    [
        ({"a": ["b"]}, {}, "give a networkx.DiGraph, not dict"),
        (nx.Graph([("a", "b")]), {}, "no directions: give a networkx.DiGraph"),
        (nx.MultiDiGraph([("a", "b")]), {}, "give networkx.DiGraph"),
        (nx.DiGraph(), {}, "no nodes: add one"),
        (dag_of("ab bc ca"), {}, "a cycle, 'a' -> 'b' -> 'c' -> 'a': unroll"),
        (dag_of("aa"), {}, "a cycle, 'a' -> 'a': unroll"),
        (nx.DiGraph([("a", "b")]), {}, "node 'a' lacks 'bytes': set it, .* it has: none"),
        (
            dag_of("ab"),
            {"bytes": "size"},
            "no node has the attribute 'size' that bytes= names; .*: bytes, run",
        ),
        (dag_of("ab"), {"pin": "why"}, "no node has the attribute 'why' that pin= names"),
        (dag_of("ab"), {"order": "rank"}, "no node has the attribute 'rank' that order= names"),
        (
            changed("d", bytes=1),
            {},
            "'d' lacks 'runtime_ns': set it, .* as in runtime_ns=\"size\"; it has: 'by",
        ),
        (changed(workspace_bytes=None), {}, "'b' lacks 'workspace_bytes'"),
        (changed(bytes=-1), {}, "'b': 'bytes' is -1, and must be a whole number of at least zero"),
        (changed(runtime_ns=0.5), {}, "'b': 'runtime_ns' is 0.5, .*: round it, or count in a smaller unit"),
        (changed(bytes=float("nan")), {}, "'bytes' is nan"),
        (changed(bytes=float("inf")), {}, "'bytes' is inf"),
        (changed(bytes="8"), {}, "'bytes' is '8'"),
        (changed(bytes=True), {}, "'bytes' is True"),
        (changed(workspace_bytes=[1]), {}, r"'workspace_bytes' is \[1\]"),
        (changed(pin=True), {}, "'pin' is True, and must say in words"),
        (changed(pin=""), {}, "'pin' is '', and must say in words"),
        (ranked(0, 1, None), {}, "node 'c' lacks 'order'"),
        (ranked(0, 1, 1), {}, "nodes 'b' and 'c' have the same 'order': number them apart"),
        (ranked(0, 2, 1), {}, "'c' reads 'b' and comes before it in the order: put 'b' first"),
        (dag_of("ab"), {"order": ["b", "a"]}, "'b' reads 'a' and comes before it"),
        (dag_of("ab"), {"order": ["a"]}, "order= must list each of the 2 nodes once"),
        (dag_of("ab"), {"order": ["a", "a"]}, "order= must list each of the 2 nodes once"),
    ],
)
def test_what_is_no_dag_of_ops_is_refused_with_the_way_out(dag: Any, how: dict[str, Any], told: str) -> None:
    with pytest.raises(ProblemError, match=told):
        from_networkx(dag, **how)


# --- any problem, and back


def through_json(dag: nx.DiGraph) -> nx.DiGraph:
    return nx.node_link_graph(json.loads(json.dumps(nx.node_link_data(dag, edges="edges"))), edges="edges")


@settings(max_examples=200)
@given(graphs.problems() | test_files.problems() | st.integers(0, 10**6).map(random_dag).map(from_networkx))
def test_a_problem_comes_back_as_it_was(problem: Problem) -> None:
    dag = problem.to_networkx()
    assert nx.is_directed_acyclic_graph(dag)
    assert Problem.from_networkx(dag) == problem
    assert Problem.from_networkx(through_json(dag)) == problem


def test_a_problem_as_a_graph_says_who_reads_what_and_what_it_allocates() -> None:
    b = graphs.Builder()
    x = b.input("x", 100)
    (a,) = b.op("f", [x], 8)
    (v,) = b.op("view", [a], view_of=a)
    (w,) = b.op("of_x", [x], view_of=x)
    b.op("h", [v, v, a, w, b.tangent("dy", 9)], 1, 2, phase="backward")
    dag = to_networkx(b.problem([], [5]))
    assert list(dag.nodes("bytes")) == [(0, 8), (1, 0), (2, 0), (3, 3)]
    assert dict(dag.edges) == {(0, 1): {"values": [1]}, (0, 3): {"values": [1]}} | {
        (1, 3): {"values": [2]},
        (2, 3): {"values": [3]},
    }


def test_without_its_format_a_problem_is_a_general_dag() -> None:
    dag = to_networkx(graphs.chain(4))
    del dag.graph["format"]
    problem = from_networkx(dag)
    assert [op.name for op in problem.graph.ops] == [op.name for op in graphs.chain(4).graph.ops]
    assert {op.phase for op in problem.graph.ops} == {"forward"}
    assert problem.costs == graphs.chain(4).costs


def test_a_changed_cost_is_read() -> None:
    dag = to_networkx(graphs.chain(3))
    dag.nodes[1]["runtime_ns"] = 77
    assert from_networkx(dag).costs[1] == OpCost(77)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda dag: dag.remove_node(0), "are its ops, 0 to 4, and these are not; .* delete graph"),
        (lambda dag: dag.remove_edge(0, 1), r"op 1 reads \[1\] of op 0 .* and nothing by the edge"),
        (lambda dag: dag.add_edge(0, 2), "op 2 reads nothing of op 0 .* and nothing by the edge"),
        (lambda dag: dag.nodes[0].update(bytes=5), "op 0 allocates 1 bytes: change storage_bytes"),
        (lambda dag: dag.nodes[0].update(colour=1), "op 0 has an unknown 'colour'"),
        (lambda dag: dag.nodes[0].pop("target"), "op 0 lacks 'target'"),
        (lambda dag: dag.graph.pop("held"), "lacks 'held'"),
        (lambda dag: dag.graph.update(format="rematc.plan/1"), "its format is 'rematc.plan/1'"),
        (lambda dag: dag.nodes[0].update(runtime_ns=object()), "can't be written as JSON"),
    ],
)
def test_a_graph_that_contradicts_itself_is_refused(change: Any, told: str) -> None:
    dag = to_networkx(graphs.chain(3))
    change(dag)
    with pytest.raises(ProblemError, match=told):
        from_networkx(dag)


def test_exchange_loads_neither_torch_nor_the_solver() -> None:
    assert "networkx" not in loaded_by("import rematc.problem")
    assert not loaded_by("import rematc.exchange") & {"torch", "ortools", "rematc.solve"}


# --- solving a general DAG


def small() -> nx.DiGraph:
    """Keeping a for d makes the peak 30; running it again before d, 21."""
    dag = dag_of("ab bc cd ad", runtime_ns=3)
    dag.nodes["d"]["bytes"] = 1
    return dag


def solved(dag: nx.DiGraph, budget: int) -> Plan:
    from rematc.solve import solve

    problem = from_networkx(dag).with_budget(budget)
    plan = solve(problem, SolveOptions(time_limit_s=5))
    validate(problem, plan)
    return plan


@pytest.mark.parametrize(("budget", "cost"), [(30, 0), (29, 3), (21, 3)])
def test_solve_of_a_dag_recomputes_under_a_budget(budget: int, cost: int) -> None:
    assert solved(small(), budget).cost_ns == cost


def test_solve_of_a_dag_refuses_with_the_smallest_budget_that_can_be_met() -> None:
    with pytest.raises(BudgetError) as refusal:
        solved(small(), 20)
    assert refusal.value.minimum_bytes == 21
