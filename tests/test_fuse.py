"""The graph of what Inductor writes: smaller than the ops, and its plans compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from rematc.backend import Partitioned, partition, pose
from rematc.capture import Capture
from rematc.errors import BudgetError, ProblemError
from rematc.options import Options
from rematc.problem import Problem
from rematc.solve import solve
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
    for _ in range(3):
        x = F.layer_norm(F.gelu(x @ w) + x, (w.shape[0],))
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


EXAMPLES: list[Callable[..., Any]] = [pointwise, normed, dropped, branched, viewed]
each_example = pytest.mark.parametrize("fn", EXAMPLES, ids=lambda f: f.__name__)
SIZES = (leaf(512, 16), leaf(16, 16))


def test_what_stays_within_a_kernel_is_no_value() -> None:
    captured, problem = posed(pointwise, *SIZES)
    assert [n for nodes in captured.nodes for n in nodes if "exp" in n.name]
    written = [problem.graph.values[v].name for op in problem.graph.ops for v in op.outputs]
    assert not [name for name in written if "sin" in name or "exp" in name]


@each_example
def test_there_are_fewer_values_than_ops_make_and_less_is_alive(fn: Callable[..., Any]) -> None:
    fused, ops = posed(fn, *SIZES)[1], posed(fn, *SIZES, inner="eager")[1]
    assert len(fused.graph.ops) < len(ops.graph.ops)
    assert solve(fused).peak_bytes <= 1.001 * solve(ops).peak_bytes
    assert len(fused.graph.gradients) == len(ops.graph.gradients)


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


def run(module: fx.GraphModule, given: dict[str, Any]) -> list[tuple[str, Any]]:
    """Outputs, each with the name of its node."""
    names = [n.name for n in module.graph.find_nodes(op="placeholder")]
    (output,) = module.graph.find_nodes(op="output")
    results = fx.Interpreter(module).run(*(given[n] for n in names), enable_io_processing=False)
    return [(str(node), value) for node, value in zip(output.args[0], results, strict=True)]


@pytest.mark.parametrize("fn", [f for f in EXAMPLES if f is not dropped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("limit", ["none", "smallest"])
def test_forward_and_backward_of_a_plan_compute_what_the_joint_graph_does(
    fn: Callable[..., Any], limit: str
) -> None:
    """Op by op, Inductor's random ops draw new numbers: dropout is tested where they are compiled."""
    budget = None
    if limit == "smallest":
        with pytest.raises(BudgetError) as refused:
            split_at(fn, 1)
        budget = refused.value.minimum_bytes
    joint, outputs, done = split_at(fn, budget)
    names = [n.name for n in joint.graph.find_nodes(op="placeholder")]
    given: dict[str, Any] = {n: torch.ones(()) for n in names if "tangents" in n}
    given |= zip((n for n in names if n not in given), SIZES, strict=False)
    expected = [value for _, value in run(joint, given)]
    forward = run(done.forward, given)
    backward = run(done.backward, given | dict(forward))
    computed = [value for _, value in [*forward[:outputs], *backward]]
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

    def shared(x: Tensor, w: Tensor) -> Tensor:
        base = x + 1
        total = (base * 2).sin() @ w + (base * 3).cos() @ w
        return (total @ w).cos().sum()

    _, outputs, done = split_at(shared, None)
    (returned,) = done.forward.graph.find_nodes(op="output")
    saved = returned.args[0][outputs:]
    taken = done.backward.graph.find_nodes(op="placeholder")[: len(saved)]
    assert [n.meta["val"].shape for n in saved] == [n.meta["val"].shape for n in taken]
    assert [n.name for n in saved] != [n.name for n in taken]
    assert done.plan.peak_bytes > done.problem.resident_bytes


def test_the_smallest_budget_takes_recomputation() -> None:
    with pytest.raises(BudgetError) as refused:
        split_at(normed, 1)
    plan = split_at(normed, refused.value.minimum_bytes)[2].plan
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
