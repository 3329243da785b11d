"""The baselines: peaks and costs known by hand, and on random graphs never better than the cheapest plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematc.baselines import STRATEGIES, Strategy, every, min_cut
from rematc.errors import OptionError
from rematc.graph import Graph, Op
from rematc.layers import find_layers, read_in_backward
from rematc.mincut import CHEAP, base_name, cheapest_cut, constants
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.schedule import one_of_each_storage
from rematc.simulate import judged, validate
from rematc.unlimited import unlimited
from tests import oracle
from tests.graphs import Builder, budgets, chain, problems, skip

ALL = {**STRATEGIES, "every_3": every(3)}
by_name = pytest.mark.parametrize("name", ALL)


def plan(name: str, problem: Problem, budget: int | None = None) -> Plan:
    strategy: Strategy = ALL[name]
    return strategy(problem.with_budget(budget), SolveOptions())


@by_name
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_every_plan_is_valid_and_none_beats_the_cheapest(name: str, problem: Problem) -> None:
    for budget in budgets(problem)[:3]:
        made = plan(name, problem, budget)
        profile = validate(problem, made)
        assert (made.status, made.strategy, made.budget_bytes) == ("baseline", name, budget)
        assert not any(s.recompute and problem.graph.ops[s.op].pin for s in profile.steps)
        if made.peak_bytes <= budget:
            best = oracle.search(problem.with_budget(budget))
            assert best is not None
            assert made.cost_ns >= best.cost_ns
    assert made.peak_bytes >= oracle.minimum_peak(problem)


@by_name
def test_the_same_problem_gives_the_same_plan(name: str) -> None:
    one, other = plan(name, skip(3), 50), plan(name, skip(3), 50)
    assert (one.saved, one.backward) == (other.saved, other.backward)


@pytest.mark.parametrize("n", [4, 16, 64, 100])
def test_peaks_on_a_chain(n: int) -> None:
    assert plan("save_all", chain(n)).peak_bytes == n + 1
    # All is recomputed at the first backward op, and stays: nothing is won. A chain has no attention.
    assert plan("recompute_all", chain(n)).peak_bytes == n + 1
    assert plan("attention_only", chain(n)).cost_ns == 0
    # n/k inputs of segments (one less, and the output), k - 1 values inside one, a gradient.
    assert plan("every_2", chain(n)).peak_bytes == n // 2 + 2
    assert plan("sqrt_l", chain(n)).peak_bytes == round(2 * n**0.5)
    assert plan("sqrt_l", chain(n)).cost_ns == n - round(n**0.5)


def blocks(layers: int) -> Problem:
    """Layers of three ops of a byte each, whose backward reads all three, between an embedding and a head."""
    b = Builder()
    h = b.op("embed", [b.input("x")], 1, module="embed")[0]
    reads = [[h]]
    for i in range(layers):
        inner = [h]
        for name in ("up", "act", "down"):
            inner += b.op(f"{name}{i}", [inner[-1]], 1, ns=10, module=f"model.h.{i}.mlp.{name}")
        reads.append(inner[:-1])
        h = inner[-1]
    y = b.op("head", [h], 1, module="head")
    grad = b.tangent("dy")
    for values in [[h], *reversed(reads)]:
        (grad,) = b.op(f"bw{len(b.ops)}", [grad, *values], 1, phase="backward")
    return b.problem(y, [grad])


def test_checkpointing_saves_the_inputs_of_layers_and_runs_each_once_more() -> None:
    problem = blocks(4)
    names = [problem.graph.values[v].name for v in plan("every_layer", problem).saved]
    assert names == ["embed.0", "down0.0", "down1.0", "down2.0", "down3.0"]
    assert plan("every_layer", problem).cost_ns == 4 * 2 * 10  # "down" is the next layer's saved input
    names = [problem.graph.values[v].name for v in plan("every_2", problem).saved]
    assert names == ["embed.0", "down1.0", "down3.0"]


def test_a_segment_is_recomputed_whole() -> None:
    problem = blocks(4)
    ops = problem.graph.ops
    backward = [ops[i] for i in plan("every_2", problem).backward]
    bursts = "".join("b" if op.phase == "backward" else "f" for op in backward).split("b")
    assert [len(burst) for burst in bursts if burst] == [5, 5]


def test_random_masks_are_saved_and_not_drawn_again() -> None:
    b = Builder()
    x = b.input("x")
    (a,) = b.op("linear", [x], 4, module="layers.0")
    (mask,) = b.op("rand", [a], 1, pin="random", module="layers.0")
    (y,) = b.op("mul", [a, mask], 4, module="layers.0")
    (z,) = b.op("head", [y], 1, module="layers.1")
    (dx,) = b.op("bw", [b.tangent("dy"), a, mask, y], 4, phase="backward")
    problem = b.problem([z], [dx])
    assert plan("recompute_all", problem).saved == (mask,)
    assert plan("every_layer", problem).saved == (mask, y)


def test_attention_is_recomputed_from_its_projections() -> None:
    b = Builder()
    q, k = (b.op(n, [b.input(n)], 2, target="aten.mm.default", module="h.0.attn")[0] for n in "qk")
    (s,) = b.op("scores", [q, k], 9, ns=5, target="aten.bmm.default", module="h.0.attn")
    (p,) = b.op("probs", [s], 9, ns=3, target="aten._softmax.default", module="h.0.attn")
    (o,) = b.op("out", [p, k], 2, ns=5, target="aten.bmm.default", module="h.0.attn")
    (y,) = b.op("proj", [o], 2, ns=50, target="aten.mm.default", module="h.0.attn")
    (dx,) = b.op("bw", [b.tangent("dy"), q, k, p, o], 2, phase="backward")
    made = plan("attention_only", b.problem([y], [dx]))
    assert (made.saved, made.cost_ns) == ((q, k), 13)
    assert "no attention" in plan("attention_only", chain(2)).notes[0]


def test_greedy_stops_as_soon_as_the_peak_fits() -> None:
    problem = chain(16)
    assert [plan("greedy", problem, b).cost_ns for b in (None, 17, 16, 15)] == [0, 0, 1, 2]
    assert [plan("greedy", problem, b).peak_bytes for b in (17, 16, 15)] == [17, 16, 15]


def test_greedy_gives_its_lowest_peak_where_nothing_fits() -> None:
    made = plan("greedy", chain(16), 1)
    assert 4 <= made.peak_bytes < 17
    assert made.budget_bytes == 1


@settings(max_examples=60, deadline=None)
@given(problems())
def test_greedy_never_needs_more_than_saving_all(problem: Problem) -> None:
    all_saved = plan("save_all", problem)
    assert plan("greedy", problem, all_saved.peak_bytes).cost_ns == all_saved.cost_ns == 0
    assert plan("greedy", problem, 1).peak_bytes <= all_saved.peak_bytes


def test_min_cut_recomputes_the_cheap_from_the_small() -> None:
    b = Builder()
    x = b.input("x")
    (a,) = b.op("mm", [x], 4, target="aten.mm.default")
    (c,) = b.op("cast", [a], 8, target="aten._to_copy.default")
    (s,) = b.op("sum", [c], 1, target="aten.sum.dim_IntList")
    (dx,) = b.op("bw", [b.tangent("dy"), c, s], 4, phase="backward")
    assert plan("min_cut", b.problem([s], [dx])).saved == (a, s)


def test_what_is_drawn_or_made_of_an_input_is_no_constant() -> None:
    b = Builder()
    (ones,) = b.op("full", [], 4, target="aten.full.default")
    (drawn,) = b.op("rand", [], 4, target="aten.rand.default", pin="random")
    (ramp,) = b.op("exp", [ones], 4, target="aten.exp.default")
    (x,) = b.op("add", [b.input("x"), ramp], 4, target="aten.add.Tensor")
    (w,) = b.op("mm", [ones, ramp], 4, target="aten.mm.default")
    (dx,) = b.op("bw", [b.tangent("dy"), x, w, drawn], 4, phase="backward")
    assert constants(b.problem([x], [dx]).graph) == {ones, ramp}


@settings(max_examples=100, deadline=None)
@given(problems())
def test_min_cut_saves_the_fewest_bytes(problem: Problem) -> None:
    g = problem.graph
    size = g.storage_bytes
    made = sorted({g.values[v].storage for i in g.forward for v in g.ops[i].outputs} - g.resident)

    def enough(saved: tuple[int, ...]) -> bool:
        there = [v for v in range(len(g.values)) if g.values[v].storage in {*saved, *g.resident}]
        return not any(banned(g, i) for i in g.ancestors(read_in_backward(g), stop=there))

    every_set = (c for r in range(len(made) + 1) for c in combinations(made, r))
    least = min(sum(size[s] for s in c) for c in every_set if enough(c))
    assert sum(size[s] for s in cheapest_cut(g) - g.resident) == least


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_without_a_limit_what_is_wanted_is_saved_and_no_order_of_the_same_needs_less(
    problem: Problem, choice: Random
) -> None:
    g = problem.graph
    read = read_in_backward(g)
    wanted = {v for v in read if choice.random() < 0.5}
    found, plain = unlimited(problem, wanted), min_cut(problem, wanted=wanted)
    validate(problem, found)
    saved = {g.values[v].storage for v in found.saved} | g.resident
    assert {g.values[v].storage for v in wanted} <= saved
    assert (found.saved, found.cost_ns) == (plain.saved, plain.cost_ns)
    assert found.peak_bytes <= plain.peak_bytes


def test_min_cut_knows_of_a_gradient_that_forward_makes() -> None:
    """It is kept, since what it is made of may not run twice."""
    b = Builder()
    (a,) = b.op("mm", [b.input("x")], 4, target="aten.mm.default")
    (c,) = b.op("cast", [a], 2, target="aten._to_copy.default")
    (dx,) = b.op("bw", [b.tangent("dy")], 4, phase="backward")
    assert plan("min_cut", b.problem([c], [c, dx])).saved == (c,)


def banned(graph: Graph, i: int) -> bool:
    op = graph.ops[i]
    storages = [{graph.values[v].storage for v in values} for values in (op.outputs, op.inputs)]
    is_view = storages[0] <= storages[1] | graph.resident
    return not is_view and (base_name(op.target) not in CHEAP or op.pin is not None or op.needed is not None)


@pytest.mark.parametrize(
    ("paths", "layers"),
    [
        (["layer1.0.conv1", "layer1.1.bn", "layer2.0.downsample.0", "layer2.0.downsample.1"], 3),  # ResNet
        (["layers.0.blocks.0", "layers.1.blocks.0", "layers.1.blocks.1", "layers.1.blocks.2"], 4),  # Swin
        (["layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.0", "layers.1.experts.1"], 2),  # MoE
        (["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"], 4),  # T5
        (["down1", "down2", "mid", "up1", "up2"], 5),  # a U-Net: slices
        (["layers.0", "", ""], 3),  # one numbered module is no numbering
    ],
)
def test_layers_are_found_by_their_numbers(paths: list[str], layers: int) -> None:
    graph = Graph((), (), tuple(Op(p, "sin", (), (), module=p) for p in paths))
    assert len(find_layers(graph)) == layers


def test_a_model_without_numbers_is_cut_into_slices() -> None:
    assert [len(part) for part in find_layers(Graph((), (), (Op("f", "sin", (), ()),) * 40))] == [2, 3] * 8
    assert plan("sqrt_l", skip(3)).cost_ns > 0


def test_segments_of_no_layer_are_refused() -> None:
    with pytest.raises(OptionError, match="at least 1"):
        every(0)


@by_name
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_with_one_value_saved_for_each_storage_a_plan_needs_no_more_and_costs_the_same(
    name: str, problem: Problem
) -> None:
    """It needs less where the plan saves a view, and makes what it is a view of once more."""
    made = plan(name, problem)
    graph = problem.graph
    single = one_of_each_storage(graph, made)
    assert judged(problem, replace(single, digest="")).peak_bytes <= made.peak_bytes
    assert judged(problem, replace(single, digest="")).cost_ns == made.cost_ns
    on = {graph.values[v].storage: v for v in reversed(single.saved)}
    for v in (v for v in single.saved if graph.values[v].storage not in graph.resident):
        # of those on one storage none is a view of another
        first = on[graph.values[v].storage]
        assert v == first or not graph.ancestors([v], stop={*graph.inputs, first}) <= graph.views
