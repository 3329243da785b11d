"""What is pinned or must run, and why: random numbers, effects, policies of checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rematc.graph import Graph
from tests.joints import graph_of, needs_grad, op, storages

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_dropout_is_random_and_must_run() -> None:
    graph = graph_of(lambda x: F.dropout(x.exp(), 0.5).sum(), needs_grad(8))
    (dropout,) = [o for o in graph.ops if o.pin]
    assert dropout.target == "aten.bernoulli.p"  # the numbers are drawn once
    assert (dropout.phase, dropout.pin, dropout.needed) == ("forward", "random", "random")


def attention(dropout_p: float) -> Graph:
    q = needs_grad(1, 2, 8, 4)
    return graph_of(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=dropout_p).sum(), q)


def test_attention_is_random_only_with_dropout() -> None:
    assert [o.pin for o in attention(0.0).ops if o.pin] == []
    assert [o.pin for o in attention(0.1).ops if o.pin] == ["random"]


def test_a_custom_op_may_have_effects() -> None:
    @torch.library.custom_op("rematc_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    double.register_autograd(lambda ctx, grad: grad * 2)
    graph = graph_of(lambda x: double(x).sin().sum(), needs_grad(8))
    pinned = op(graph, "double")
    assert pinned.pin == (
        "effect: custom op of 'rematc_tests', which may do more than its result shows: see rematc.pure"
    )
    assert pinned.needed == pinned.pin


def norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).train()


def test_batchnorm_writes_its_buffers_in_the_forward_pass() -> None:
    """Its three buffers, in their own storages, which are there before the step and after it."""
    graph = graph_of(norm(), torch.randn(2, 2, 4, 4))
    copies = [o for o in graph.ops if "copy_" in o.target]
    assert [(o.phase, o.pin, o.needed) for o in copies] == [("forward", "mutates", "mutates")] * 3
    written = {s for o in copies for s in storages(graph, o.outputs)}
    assert len(written) == 3
    assert written <= graph.resident


def test_no_forward_op_reads_a_tangent_and_effects_of_forward_stay_there() -> None:
    graph = graph_of(lambda x: F.dropout(norm()(x), 0.3).exp().sum(), needs_grad(2, 2, 4, 4))
    assert all(o.phase == "forward" for o in graph.ops if o.needed)
    reads = {v for o in graph.ops if o.phase == "forward" for v in o.inputs}
    assert not reads & set(graph.tangents)


def products_saved(x: Tensor) -> Tensor:
    """A region whose policy saves the matrix product."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    found: Tensor = checkpoint(
        lambda y: (y @ y.t()).sin().exp(), x, use_reentrant=False, context_fn=contexts
    ).sum()
    return found


def test_what_a_checkpoint_policy_must_save_is_pinned_and_nothing_else_of_its_region() -> None:
    graph = graph_of(products_saved, needs_grad(4, 4))
    pins = {o.target.split(".")[1]: o.pin for o in graph.ops if o.phase == "forward"}
    assert pins["mm"] is not None and pins["mm"].startswith("saved: a checkpoint policy")
    assert pins["sin"] is pins["exp"] is None
    assert all(o.needed is None for o in graph.ops)


def test_every_pin_is_a_word_or_a_sentence() -> None:
    fns = [norm(), lambda x: F.dropout(x, 0.5).sum()]
    ops = [o for fn in fns for o in graph_of(fn, needs_grad(2, 2, 4, 4)).ops]
    reasons = {r for o in ops for r in (o.pin, o.needed) if r is not None}
    assert all(r.split(":")[0] in ("random", "mutates", "collective", "effect") for r in reasons)
    assert {"random", "mutates"} <= reasons
