"""`capture`: what the joint graph of a model is read as, against what a run of it really does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from rematc.capture import capture
from rematc.errors import CaptureError
from rematc.passes import canonicalize
from rematc.rounding import in_units
from rematc.versions import holds_tangents
from tests.joints import graph_of, joint_of, needs_grad, op, read, storages

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    graph = read(lambda x: x.exp().sum(), needs_grad(129), rounded=in_units).graph
    assert graph.storage_bytes[graph.values[op(graph, "exp").outputs[0]].storage] == 1024
    assert set(graph.storage_bytes) == {512, 1024}


def test_sparse_gradients_are_refused_with_the_way_out() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(CaptureError, match=r"torch.sparse_coo.*\n.*sparse=False"):
        read(lambda i: table(i).sum(), torch.arange(3))
