"""Dropout is taken apart: its mask is saved, what it drops from is dropped from again, to the same bits."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.passes.dropout import split_dropout
from tests.cases import (
    ROWS,
    WIDTH,
    Case,
    Trained,
    assert_as_inductor_alone,
    assert_same_bits,
    under_the_smallest_budget,
)
from tests.joints import graph_of, joint_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
aten = torch.ops.aten


def is_one_op(x: Tensor, of: Callable[[Tensor], Tensor] = torch.exp, train: bool = True) -> bool:
    joint, _ = joint_of(lambda x: F.dropout(of(x), 0.1, train).sin().sum(), x.requires_grad_())
    split_dropout(joint)
    joint.graph.lint()
    return any(n.target is aten.native_dropout.default for n in joint.graph.nodes)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.37, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_two_have_the_bits_of_the_one_and_draw_as_many_numbers(dtype: torch.dtype, p: float) -> None:
    for shape in ((257, 33), (4, 8, 5, 3), (100_003,), (0, 4)):
        x = torch.randn(shape, dtype=dtype)
        torch.manual_seed(1)
        dropped, mask = aten.native_dropout.default(x, p, True)
        then = torch.get_rng_state()
        torch.manual_seed(1)
        stays = aten.bernoulli.p(aten.empty_like.default(x, dtype=torch.bool), 1 - p)
        again = aten.native_dropout_backward.default(x, stays, 1 / (1 - p) if p < 1 else 0.0)
        assert torch.equal(torch.get_rng_state(), then)
        assert torch.equal(stays, mask) and torch.equal(again, dropped)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_products_have_the_same_bits_too(p: float) -> None:
    """Which are what Inductor has code for."""
    x, results = torch.randn(64, 33, requires_grad=True), []
    for is_split in (False, True):
        joint, _ = joint_of(lambda x: F.dropout(x.exp(), p).sin().sum(), x)
        if is_split:
            split_dropout(joint, for_inductor=True)
            joint.graph.lint()
            joint.recompile()
        torch.manual_seed(4)
        with torch.no_grad():
            results.append(joint([x], [torch.ones(())]))
        left = [n for n in joint.graph.nodes if "native_dropout.default" in str(n.target)]
        assert bool(left) is not is_split
    for one, two in zip(*results, strict=True):
        assert all(map(torch.equal, one, two))


def test_what_would_have_other_bits_stays_one_op() -> None:
    assert not is_one_op(torch.ones(8, 8))
    assert is_one_op(torch.ones(8, 8, dtype=torch.bfloat16))
    assert is_one_op(torch.ones(8, 8), lambda x: x.t().exp())


def test_a_view_of_what_was_dropped_takes_no_memory_of_its_own() -> None:
    x = torch.ones(8, 8, requires_grad=True)
    graph = graph_of(lambda x: F.dropout(x.exp(), 0.1).view(-1).sin().sum(), x)
    (view,) = (op for op in graph.ops if op.target == "aten.view.default" and op.phase == "forward")
    assert graph.values[view.outputs[0]].storage == graph.values[view.inputs[0]].storage


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.2)
        return x.square().mean()


def test_masks_are_saved_and_the_rest_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer bytes than where dropout is one op, whose result is saved; the bits are the same."""
    case = Case(Dropping, "bernoulli")
    ours, backend = under_the_smallest_budget(case)
    assert_same_bits(case, ours, backend)
    monkeypatch.setattr(sys.modules["rematc.passes.canonicalize"], "split_dropout", lambda joint, **_: None)
    _, whole = under_the_smallest_budget(case)
    assert _peak(backend) < _peak(whole) - 3 * ROWS * WIDTH


@pytest.mark.slow
def test_under_inductor_a_plan_keeps_the_seeds_and_draws_masks_again_where_there_is_no_room() -> None:
    """The seeds are pinned, and say why; a mask is made of them again."""
    case = Case(Dropping, "")
    ours, backend = under_the_smallest_budget(case, "inductor")
    assert_as_inductor_alone(case, ours)
    (problem,), (plan,) = backend.problems, backend.plans
    ops, saved = problem.graph.ops, set(plan.saved)
    assert [op.pin for op in ops if saved.intersection(op.outputs) and "seeds" in op.target] == ["random"]
    masks = {i for i, op in enumerate(ops) if op.target == "prims.inductor_random.default"}
    again = masks.intersection(plan.backward)
    kept = {i for i in masks if saved.intersection(ops[i].outputs)}
    assert len(masks) == 6 and again - kept and kept | again == masks


@pytest.mark.slow
def test_under_inductor_where_it_is_to_draw_as_eager_does_the_masks_are_eager_s() -> None:
    """It has no code for `native_dropout_backward`, and stopped in an AssertionError of its own."""
    case = Case(Dropping, "bernoulli")
    with importlib.import_module("torch._inductor.config").patch(fallback_random=True):
        ours, backend = under_the_smallest_budget(case, "inductor")
        assert backend.resident_bytes + ours.peak_bytes() <= _peak(backend)
    for mine, eager in zip(ours.states, Trained(case, "aot_eager").states, strict=True):
        for a, b in zip(mine, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    (problem,), (plan,) = backend.problems, backend.plans
    targets = [op.target for op in problem.graph.ops]
    assert targets.count("aten.bernoulli.p") == 6 and "aten.native_dropout.default" not in targets
    assert plan.cost_ns > 0


def _peak(backend: rematc.Backend) -> Any:
    return backend.plans[0].peak_bytes
