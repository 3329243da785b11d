"""The graph of what Inductor writes: smaller than the ops, and its plans compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from rematc.baselines import min_cut
from rematc.capture import Capture
from rematc.costs import rates
from rematc.errors import BudgetError, ProblemError
from rematc.fuse import Kernel, fuse
from rematc.options import Options
from rematc.partition import Partitioned, partition
from rematc.passes import split
from rematc.pose import pose
from rematc.problem import Problem
from rematc.solve import solve
from rematc.unlimited import unlimited
from tests import test_capture

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SEED = 11


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(SEED)).requires_grad_()


joint_of = partial(test_capture.joint_of, inductor_ops=True)


def posed(fn: Callable[..., Any], *args: Tensor, inner: Any = "inductor") -> tuple[Capture, Problem]:
    joint, outputs = joint_of(fn, *args)
    return pose(joint, outputs, Options(None, inner))


def pointwise(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin().exp().tanh().cos() @ w).sum()


def normed(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = F.layer_norm(F.gelu(x @ w) + x, (w.shape[0],))
    return x.square().mean()


def batch_normed(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        y = (x @ w).view(32, 16, 4, 4)
        x = F.batch_norm(y, None, None, w[0], w[1], training=True).relu().view_as(x)
    return x.square().mean()


def dropped(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = F.dropout(torch.softmax(x @ w, -1), 0.3) @ w.t()
    return x.sum()


def branched(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = (x @ w).relu()
    left, right = a.chunk(2, -1)
    b = torch.cat([left.t().sigmoid(), right.t().exp()], 0)
    return (b.t() @ w).sum(), a.detach().max()


def viewed(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).view(4, -1, w.shape[1]).transpose(0, 1).contiguous().sin()
    return y.flatten(1).cos().sum() + y[0].sum()


def gated(x: Tensor, w: Tensor) -> Tensor:
    """SiLU: its sigmoid is read by two kernels of the backward pass, and written between them on a CPU."""
    for _ in range(2):
        x = F.silu(x @ w) @ w.t()
    return x.square().mean()


EXAMPLES: list[Callable[..., Any]] = [pointwise, normed, dropped, branched, viewed, gated]
each_example = pytest.mark.parametrize("fn", EXAMPLES, ids=lambda f: f.__name__)
SIZES = (leaf(512, 16), leaf(16, 16))


def test_what_is_drawn_is_neither_cheap_nor_drawn_again_without_need() -> None:
    """A mask of one byte is a comparison, which is cheap, of numbers that are drawn in the same kernel."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(2):
            x = F.dropout(F.relu(x @ w), 0.3)
        return (x @ w).sum()

    captured, problem = posed(fn, leaf(64, 64), leaf(64, 64))
    draws = {i for i, nodes in enumerate(captured.nodes) if any("random" in n.name for n in nodes)}
    assert draws and draws.isdisjoint(min_cut(problem).backward)
    drawn_ns = 1e9 * 4 * 64 * 64 / rates.calibrate(torch.device("cpu"), rates._ON_A_CPU).random
    assert min(problem.costs[i].runtime_ns for i in draws) > drawn_ns


def test_what_stays_within_a_kernel_is_no_value() -> None:
    captured, problem = posed(pointwise, *SIZES)
    assert [n for nodes in captured.nodes for n in nodes if "exp" in n.name]
    written = [problem.graph.values[v].name for op in problem.graph.ops for v in op.outputs]
    assert not [name for name in written if "sin" in name or "exp" in name]


def test_constants_are_no_values() -> None:
    """Kernels have them within: those of a cross entropy were written in forward, and kept for backward."""
    labels = torch.arange(512) % 16
    _, problem = posed(lambda x, w: F.cross_entropy(x @ w, labels), *SIZES)
    graph = problem.graph
    assert [op.name for op in graph.ops if op.phase == "forward"]
    assert not [op.name for i, op in enumerate(graph.ops) if not op.inputs and i not in graph.views]


@each_example
def test_there_are_fewer_values_than_ops_make_and_less_is_alive(fn: Callable[..., Any]) -> None:
    fused, ops = posed(fn, *SIZES)[1], posed(fn, *SIZES, inner="eager")[1]
    assert len(fused.graph.ops) < len(ops.graph.ops)
    assert solve(fused).peak_bytes <= 1.001 * solve(ops).peak_bytes
    assert len(fused.graph.gradients) == len(ops.graph.gradients)


@each_example
def test_each_value_is_made_by_one_op_so_what_backward_can_recompute_may_be_saved(
    fn: Callable[..., Any],
) -> None:
    """What a product reads in both passes is written in both: one value, whoever makes it."""
    graph = posed(fn, *SIZES)[1].graph
    made = [graph.values[v].name for op in graph.ops for v in op.outputs]
    assert len(made) == len(set(made))
    of_gradients = {*graph.tangents}
    for op in graph.ops:
        if not of_gradients.isdisjoint(op.inputs):
            of_gradients.update(op.outputs)
    assert all((op.phase == "backward") == of_gradients.issuperset(op.outputs) for op in graph.ops)


def test_each_value_is_made_in_time_for_the_first_kernel_that_reads_it() -> None:
    """Inductor folds ops, and writes late what they read: what reads nothing, as a draw, would run before."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(4.0)
        product = at * x
        return (product.exp() * torch.rand(4)).sum(), at

    joint, outputs = joint_of(fn, leaf(4), inductor_ops=False)
    captured, problem = pose(joint, outputs, Options(None, "eager"))
    names = ("mul",), ("rand",), ("exp", "mul_1", "sum_1"), ("arange",)
    fused = fuse(captured, min_cut(problem), tuple(map(Kernel, names)), ())
    made = [op.name for op in fused.graph.ops if op.phase == "forward"]
    assert made[:3] == ["arange", "mul", "rand"]


def test_what_only_kernels_of_backward_read_is_computed_in_each_of_them() -> None:
    captured, problem = posed(gated, *SIZES)
    names = ("sigmoid", "reciprocal")  # the older torch takes it apart
    assert not [v.name for v in problem.graph.values if v.name.startswith(names)]
    backward = [i for i, op in enumerate(problem.graph.ops) if op.phase == "backward"]
    assert [n for i in backward for n in captured.nodes[i] if n.name.startswith(names)]


def test_the_smallest_budget_is_no_larger_than_op_by_op() -> None:
    with pytest.raises(BudgetError) as refused:
        solve(posed(gated, *SIZES, inner="eager")[1], budget_bytes=1)
    assert smallest(gated) <= 1.01 * refused.value.minimum_bytes


def test_without_a_limit_the_plan_is_torch_s_and_with_room_for_all_nothing_runs_again() -> None:
    free, roomy = (split_at(normed, budget)[2].plan for budget in (None, 10**9))
    assert (free.strategy, free.budget_bytes, roomy.cost_ns) == ("min_cut", None, 0)
    assert free.peak_bytes <= roomy.peak_bytes and free.cost_ns == 0


def test_without_a_limit_what_a_product_reads_is_saved_and_not_made_again_in_a_kernel_of_its_own() -> None:
    """Fewer bytes would be saved without the output of each gelu and norm: torch's partitioner saves it."""
    _, problem = posed(normed, *SIZES)
    free = split_at(normed, None)[2].plan
    fewest = min_cut(problem)
    assert fewest.cost_ns > 0 and free.cost_ns == 0 and set(fewest.saved) != set(free.saved)


def test_without_a_limit_backward_runs_in_the_order_of_the_lowest_peak() -> None:
    _, problem = posed(gated, *SIZES)
    made = [v for i in problem.graph.forward for v in problem.graph.ops[i].outputs]
    assert unlimited(problem, made).peak_bytes < 0.9 * min_cut(problem, wanted=made).peak_bytes


def test_seeds_are_drawn_once_and_what_is_made_of_them_may_run_again() -> None:
    captured, _ = posed(dropped, *SIZES)
    forward = [i for i, op in enumerate(captured.graph.ops) if op.phase == "forward"]
    pinned = [i for i in forward if captured.graph.ops[i].pin]
    drawn = [i for i in forward if any("inductor_seeds" in n.name for n in captured.nodes[i])]
    masks = [i for i in forward if any("inductor_random" in n.name for n in captured.nodes[i])]
    assert pinned == drawn and len(drawn) == 1
    assert len(masks) == 3


@each_example
def test_every_node_that_a_written_value_needs_is_in_its_op_or_written(fn: Callable[..., Any]) -> None:
    captured, _ = posed(fn, *SIZES)
    for op, nodes in zip(captured.graph.ops, captured.nodes, strict=True):
        read = {captured.value_nodes[v] for v in op.inputs}
        for i, node in enumerate(nodes):
            assert all(n in read or n in nodes[:i] for n in node.all_input_nodes)


def split_at(fn: Callable[..., Any], budget: int | None) -> tuple[fx.GraphModule, int, Partitioned]:
    joint, outputs = joint_of(fn, *SIZES)
    twin, _ = joint_of(fn, *SIZES)
    return twin, outputs, partition(joint, outputs, Options(budget, "inductor"), planned=True)


@cache
def smallest(fn: Callable[..., Any]) -> int:
    """The smallest budget."""
    with pytest.raises(BudgetError) as refused:
        split_at(fn, 1)
    return refused.value.minimum_bytes


def names_of(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.find_nodes(op="placeholder")]


def run(module: fx.GraphModule, given: dict[str, Any]) -> list[Any]:
    inputs = (given[name] for name in names_of(module))
    return list(fx.Interpreter(module).run(*inputs, enable_io_processing=False))


def given_to(joint: fx.GraphModule) -> dict[str, Any]:
    names = names_of(joint)
    given: dict[str, Any] = {n: torch.ones(()) for n in names if "tangents" in n}
    return given | dict(zip((n for n in names if n not in given), SIZES, strict=False))


def computed_by(
    forward: fx.GraphModule, backward: fx.GraphModule, joint: fx.GraphModule, outputs: int
) -> list[Any]:
    given = given_to(joint)
    made = run(forward, given)
    saved = zip(names_of(backward), made[outputs:], strict=False)  # behind them come the tangents
    return [*made[:outputs], *run(backward, given | dict(saved))]


@pytest.mark.parametrize(
    ("fn", "limit"),
    [
        pytest.param(fn, limit, marks=pytest.mark.slow if (fn, limit) == (normed, "smallest") else ())
        for fn in EXAMPLES
        for limit in ("none", "smallest")
        if fn is not dropped
    ],
)
def test_forward_and_backward_of_a_plan_compute_what_the_joint_graph_does(
    fn: Callable[..., Any], limit: str
) -> None:
    """Op by op, Inductor's random ops draw new numbers: dropout is tested where they are compiled."""
    budget = smallest(fn) if limit == "smallest" else None
    joint, outputs, done = split_at(fn, budget)
    expected = run(joint, given_to(joint))
    computed = computed_by(done.forward, done.backward, joint, outputs)
    torch.testing.assert_close(computed, expected, rtol=0, atol=0)
    if budget is not None:
        assert done.plan.peak_bytes <= budget


def test_inductor_is_asked_to_write_each_value_of_the_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[fx.Node] = []
    monkeypatch.setattr("rematc.compat.write_out", asked.append)
    _, _, done = split_at(normed, None)
    graph, plan = done.problem.graph, done.plan
    for module, steps in ((done.forward, graph.forward_steps(plan.saved)), (done.backward, plan.backward)):
        written = [v for i in steps if i not in graph.views for v in graph.ops[i].outputs]
        here = [node for node in asked if node.graph is module.graph]
        assert len(here) == len(set(here)) == len(written) > 0


def test_saved_values_reach_backward_though_names_differ() -> None:
    """An op in several kernels is copied into each: then forward's nodes are not named as the joint's."""

    joint, outputs = joint_of(normed, *SIZES)
    captured, _ = pose(joint, outputs, Options(None, "inductor"))
    plan = split_at(normed, smallest(normed) * 11 // 10)[2].plan
    forward, backward = split(joint, captured, plan, outputs)
    (returned,) = forward.graph.find_nodes(op="output")
    saved = returned.args[0][outputs:]
    taken = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    assert [n.meta["val"].shape for n in saved] == [n.meta["val"].shape for n in taken]
    assert [n.name for n in saved] != [n.name for n in taken]


def test_the_smallest_budget_takes_recomputation() -> None:
    plan = split_at(normed, smallest(normed))[2].plan
    assert plan.cost_ns > 0
    assert plan.peak_bytes < split_at(normed, None)[2].plan.peak_bytes


def test_a_graph_whose_kernels_can_t_be_read_is_planned_for_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise ProblemError("op 'a' reads value 3 before it is made")

    monkeypatch.setattr("rematc.inductor.fuse", fail)
    joint, outputs = joint_of(normed, *SIZES)
    done = partition(joint, outputs, Options(None, "inductor"), planned=True)
    assert "reads value 3 before it is made" in caplog.text
    assert done.plan.peak_bytes > 0
    monkeypatch.undo()
    assert len(split_at(normed, None)[2].problem.graph.ops) < len(done.problem.graph.ops)
