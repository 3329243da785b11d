"""`capture`: what the joint graph of a model is read as, against what a run of it really does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rematc import compat
from rematc.capture import Capture, capture
from rematc.errors import CaptureError
from rematc.graph import Graph, Op
from rematc.passes import canonicalize
from rematc.trace import trace_joint
from rematc.versions import holds_tangents

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class _StopError(Exception):
    pass


def joint_of(fn: Callable[..., Any], *args: Any, inductor_ops: bool = False) -> tuple[fx.GraphModule, int]:
    """The joint graph of ``fn(*args)``, and how many of its outputs are forward's."""
    torch._dynamo.reset()
    found: list[tuple[fx.GraphModule, int]] = []

    def keep(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise _StopError

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        if inductor_ops:
            return trace_joint(gm, inputs, inductor_ops=True, partition_fn=keep)
        return compat.aot_eager(gm, inputs, partition_fn=keep, compiler=lambda g, _: g)

    with pytest.raises(Exception, match="_StopError"):
        torch.compile(fn, backend=backend)(*args)
    return found[0]


def read(fn: Callable[..., Any], *args: Any, allocation_bytes: int = 1) -> Capture:
    joint, outputs = joint_of(fn, *args)
    return capture(canonicalize(joint, outputs), outputs, allocation_bytes)


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    return read(fn, *args).graph


def op(graph: Graph, name: str) -> Op:
    """The first op whose target has ``name`` in it."""
    return next(o for o in graph.ops if name in o.target)


def storages(graph: Graph, values: tuple[int, ...]) -> list[int]:
    return [graph.values[v].storage for v in values]


def needs_grad(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, requires_grad=True)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda y: y.view(-1),
    "t": lambda y: y.t(),
    "expand": lambda y: y[:, :1].expand(4, 6),
    "select": lambda y: y[0],
    "slice": lambda y: y[1:3],
    "unsqueeze": lambda y: y.unsqueeze(0),
    "split": lambda y: y.chunk(2)[1],
    "unbind": lambda y: y.unbind(0)[3],
    "_unsafe_view": lambda y: torch.ops.aten._unsafe_view(y, [24]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_stands_in_the_storage_of_what_it_views(name: str) -> None:
    graph = graph_of(lambda x: VIEWS[name](x.sin()).exp().sum(), needs_grad(4, 6))
    (source,) = storages(graph, op(graph, "sin").outputs)
    made = storages(graph, op(graph, f"aten.{name}.").outputs)
    assert made and set(made) == {source}
    assert graph.storage_bytes[source] == 96
    assert storages(graph, op(graph, "aten.exp.").outputs) != [source]


def test_outputs_of_one_op_have_storages_of_their_own() -> None:
    graph = graph_of(lambda x: F.layer_norm(x, (8,)).sum(), needs_grad(4, 8))
    norm = op(graph, "native_layer_norm")
    assert [graph.storage_bytes[s] for s in storages(graph, norm.outputs)] == [128, 16, 16]
    assert not any(o.target.endswith("getitem") for o in graph.ops)


def test_outputs_that_alias_inputs_and_each_other() -> None:
    def aliases(x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return y, y.t(), x.view(-1), y.sum()

    graph = graph_of(aliases, needs_grad(4, 6))
    y, transposed, of_input, total = storages(graph, graph.outputs)
    assert transposed == y
    assert of_input in graph.resident
    assert len({y, of_input, total}) == 3


def test_an_output_returned_twice_counts_once() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y

    assert len(graph_of(twice, needs_grad(4)).outputs) == 1


# Pins


def test_dropout_is_random_and_must_run() -> None:
    graph = graph_of(lambda x: F.dropout(x.exp(), 0.5).sum(), needs_grad(8))
    (dropout,) = [o for o in graph.ops if o.pin]
    assert dropout.target == "aten.native_dropout.default"
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
    assert pinned.pin == "effect: custom op of 'rematc_tests', which may do more than its result shows"
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


# Tangents


def test_the_gradient_of_the_loss_is_held_and_others_are_not() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp().sum(), x.sin()

    graph = graph_of(two, needs_grad(8))
    sizes = [graph.storage_bytes[s] for s in storages(graph, graph.tangents)]
    assert sizes == [4, 32]
    assert graph.held == (graph.tangents if holds_tangents() else graph.tangents[:1])


# Names


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def modules(fn: Callable[..., Any]) -> list[str]:
    return list(dict.fromkeys(o.module for o in graph_of(fn, needs_grad(3, 4)).ops if o.phase == "forward"))


MODEL = Model()


def test_module_paths_are_those_of_named_modules() -> None:
    assert modules(Model()) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1", "head"]
    assert modules(nn.Sequential(nn.Linear(4, 4), nn.GELU())) == ["0", "1"]
    assert modules(nn.Linear(4, 4)) == [""]


def test_module_paths_inside_a_function_start_with_the_users_own_name() -> None:
    inner = Model()
    assert modules(lambda x: MODEL(x).sum())[0] == "MODEL.layers.0.0"
    assert modules(lambda x: inner(x).sum())[0] == "inner.layers.0.0"
    assert modules(lambda x: x.exp().sum()) == [""]


def test_backward_ops_carry_the_module_of_their_forward_op() -> None:
    graph = graph_of(Model(), needs_grad(3, 4))
    assert {o.module for o in graph.ops if o.target == "aten.gelu_backward.default"} == {
        "layers.0.1",
        "layers.1.1",
    }


# Sizes


class _Sizes(fx.Interpreter):
    """Runs a graph on real tensors and notes the storage of each value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        out = super().run_node(node)
        if isinstance(out, Tensor):
            self.found[node.name] = out
        return out


def convolve(x: Tensor) -> Tensor:
    y = F.batch_norm(F.conv2d(x, x[:, :, :3, :3]), None, None, training=True)
    a, b = y.relu().chunk(2, dim=2)
    return (a.flatten(1) @ b.flatten(1).t()).softmax(-1).transpose(0, 1).contiguous().logsumexp(0).sum()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "model": MODEL,
    "convolve": convolve,
    "mixed": lambda x: (x.half().double() * x[..., 1:2]).cumsum(0)[1:].to(torch.bfloat16).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_storages_are_those_of_a_real_run(name: str) -> None:
    """Same sizes in bytes, and two values share one exactly where the real tensors do."""
    x = needs_grad(3, 4) if name == "model" else needs_grad(2, 2, 8, 8)
    joint, outputs = joint_of(FUNCTIONS[name], x)
    graph = capture(canonicalize(joint, outputs), outputs).graph
    vals = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    run = _Sizes(joint)
    with torch.no_grad():
        run.run(*(torch.ones(v.shape, dtype=v.dtype) for v in vals), enable_io_processing=False)
    real: dict[int, int] = {}
    for value in graph.values:
        if (tensor := run.found.get(value.name)) is not None:
            storage = tensor.untyped_storage()
            assert graph.storage_bytes[value.storage] == storage.nbytes(), value.name
            assert real.setdefault(value.storage, storage._cdata) == storage._cdata, value.name
    assert len(set(real.values())) == len(real) > 5


def test_sizes_are_rounded_up_as_the_allocator_does() -> None:
    graph = read(lambda x: x.exp().sum(), needs_grad(129), allocation_bytes=512).graph
    assert graph.storage_bytes[graph.values[op(graph, "exp").outputs[0]].storage] == 1024
    assert set(graph.storage_bytes) == {512, 1024}


def test_sparse_gradients_are_refused_with_the_way_out() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(CaptureError, match=r"torch.sparse_coo.*\n.*sparse=False"):
        read(lambda i: table(i).sum(), torch.arange(3))
