"""Ops that rematc does not look into: those that carry graphs, and sizes that data decides."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

import rematc
from rematc import compat
from rematc.capture import capture
from rematc.graph import Op
from rematc.versions import torch_version
from tests.test_graphs import (
    WIDTH,
    Around,
    Middle,
    assert_kept,
    by_turns,
    compiled,
    eager,
    peaks,
    plain,
    unlimited,
    wavy,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
CARRIES = "effect: a higher-order op, its body is not looked into"


def kept(middle: Middle, share: float = 0.75, **how: Any) -> rematc.Backend:
    return assert_kept(lambda _: Around(middle), share=share, **how)


def pinned(backend: rematc.Backend, pin: str) -> list[Op]:
    """Of the forward pass, for that reason; no plan recomputes one."""
    (problem,), (plan,) = backend.problems, backend.plans
    ops = problem.graph.ops
    assert not [ops[i] for i in plan.backward if ops[i].phase == "forward" and ops[i].pin]
    return [op for op in ops if op.phase == "forward" and op.pin and op.pin.startswith(pin)]


# Ops that carry graphs


def chosen(x: Tensor) -> Tensor:
    mean = x.mean(0)  # read by one branch alone
    out: Tensor = torch.cond(x.sum() < 10**9, lambda x: (x * mean).sin().exp(), lambda x: x.cos(), (x,))
    return out


def not_chosen(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 10**9, lambda x: x.cos(), lambda x: x.sin().exp(), (x,))
    return out


def scanned(x: Tensor) -> Tensor:
    def next_of(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = (carry + row).sin()
        return carry, carry.exp()

    rows: Tensor = scan(next_of, x.new_zeros(16, WIDTH), x.view(16, -1, WIDTH))[1]
    return rows.view(x.shape)


def mapped(x: Tensor) -> Tensor:
    out: Tensor = map_rows(wavy, x)  # type: ignore[arg-type]
    return out


def looped(x: Tensor) -> Tensor:
    """Without gradients: torch does not train through one."""

    def more(n: Tensor, _: Tensor) -> Tensor:
        return n < 3

    def body(n: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return n + 1, y.sin()

    start = torch.zeros((), dtype=torch.int64)
    scale: Tensor = while_loop(more, body, (start, x.detach()))[1]
    return x * scale


@pytest.mark.parametrize(
    ("middle", "name"),
    [(chosen, "cond"), (not_chosen, "cond"), (scanned, "scan"), (mapped, "map"), (looped, "while_loop")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_op_that_carries_graphs_runs_once(middle: Middle, name: str) -> None:
    (op,) = pinned(kept(middle), CARRIES)
    assert name in op.target


def test_an_associative_scan_is_ops_like_others() -> None:
    def products(x: Tensor) -> Tensor:
        out: Tensor = associative_scan(torch.mul, x.view(8, -1, WIDTH), dim=0, combine_mode="generic")
        return out.view(x.shape)

    assert not pinned(kept(products), "")


@torch.compiler.nested_compile_region
def inner_region(x: Tensor) -> Tensor:
    return x.sin().exp()


@torch.compiler.nested_compile_region
def outer_region(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(inner_region(x), 0.3).cos() + inner_region(x.tanh())


def by_regions(x: Tensor) -> Tensor:
    return outer_region(outer_region(x)) * inner_region(x)


def test_regions_are_ops_like_others() -> None:
    if torch_version() < (2, 12):
        pytest.skip("this torch can't take regions in line")
    model, backend = Around(by_regions), eager("400kB")
    expected = by_turns(model, model, (plain,))  # aot_eager adds gradients up in another order
    run = compiled(model, backend)
    assert all(torch.equal(a, b) for a, b in zip(by_turns(model, run, (plain,)), expected, strict=True))
    assert max(peaks(model, run, (plain,))) <= 400_000 < unlimited(lambda _: model, plain)
    assert {op.pin for op in pinned(backend, "")} == {"random"}


def by_partitioner() -> Any:
    return partial(torch.compile, options={"custom_partitioner_fn": rematc.partitioner("5MB")})


def by_an_older_torch() -> Any:
    return partial(torch.compile, backend=eager("5MB"))


@pytest.mark.parametrize("compiling", [by_partitioner, by_an_older_torch], ids=lambda how: how.__name__)
def test_a_region_that_torch_splits_by_itself_is_refused(compiling: Callable[[], Any]) -> None:
    run = compiling()(Around(by_regions))
    with (
        mock.patch.object(compat, "_without_regions", lambda gm: gm),
        pytest.raises(
            Exception, match=r"nested_compile_region by itself; .*\n  what to try: no region; or torch"
        ),
    ):
        run(torch.randn(8, WIDTH))


def attended(x: Tensor) -> Tensor:
    """On a CPU torch has no backward pass of it: its inputs have no gradient."""
    q = x.detach().view(2, 128, 2, 16).transpose(1, 2)
    found = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + 0.01 * (i - j))
    assert isinstance(found, Tensor)
    return x * found.transpose(1, 2).reshape(x.shape)


def test_flex_attention_is_pinned() -> None:
    model, backend = Around(attended), eager("5MB")
    expected = by_turns(model, compiled(model, "aot_eager"), (plain,), rounds=1)
    found = by_turns(model, compiled(model, backend), (plain,), rounds=1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (op,) = pinned(backend, CARRIES)
    assert "flex_attention" in op.target


def of_a_kernel() -> fx.GraphModule:
    """A call of a user's Triton kernel, made by hand: here there may be no Triton."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(triton_kernel_wrapper_functional, kwargs={"kernel_idx": 0, "kwargs": {"x": x}})
    first = graph.call_function(operator.getitem, (both, "first"))
    graph.output((first,))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4)
        both.meta["val"] = {"first": torch.empty(8), "other": torch.empty(16)}
        first.meta["val"] = both.meta["val"]["first"]
    return fx.GraphModule({}, graph)


class Kernel:
    """As Triton's, with what it is made of."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn


Kernel.__module__ = "triton.runtime.jit"


def test_results_with_names_are_values_like_others() -> None:
    with mock.patch.object(kernel_side_table, "get_kernel", return_value=None):
        found = capture(of_a_kernel(), 1).graph
    assert [found.storage_bytes[found.values[v].storage] for v in found.ops[0].outputs] == [32, 64]
    assert found.ops[0].pin == found.ops[0].needed == CARRIES
    assert found.outputs == found.ops[0].outputs[:1]


def test_a_kernel_of_a_user_is_pinned_unless_it_is_declared_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("rematc.pure"), "_DECLARED", set())
    kernel = Kernel(lambda x: None)
    with mock.patch.object(kernel_side_table, "get_kernel", return_value=kernel):
        before = capture(of_a_kernel(), 1).graph.ops[0]
        assert rematc.pure(kernel) is kernel
        after = capture(of_a_kernel(), 1).graph.ops[0]
    assert before.pin is not None and "see rematc.pure" in before.pin
    assert after.pin is None and after.needed is None


# What an op takes while it runs

TIMES = 20


def spread(x: Tensor) -> Tensor:
    return (x.repeat(TIMES, 1) + 1).view(TIMES, *x.shape).mean(0)


@torch.library.custom_op("test_opaque::wide", mutates_args=())
def wide(x: Tensor) -> Tensor:
    return spread(x)


wide.register_fake(torch.empty_like)
wide.register_autograd(lambda ctx, grad: grad)


def wide_branch(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() < 10**9, spread, torch.cos, (x,))
    return out


@pytest.mark.parametrize("middle", [wide, wide_branch, attended], ids=["custom op", "cond", "flex attention"])
def test_what_an_op_takes_while_it_runs_is_counted_or_said(
    middle: Middle, caplog: pytest.LogCaptureFixture
) -> None:
    """What can't be run on made-up data, to find out, needs a warning that says what to do."""
    budget = 400_000
    model = Around(middle)
    run = compiled(model, eager(budget))
    by_turns(model, run, (plain,))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rematc")]
    assert max(peaks(model, run, (plain,))) <= budget or any("reserve=" in text for text in said)


# Sizes that only the run knows

KNOWN_BY_THE_RUN = {
    "boolean index": lambda x: x + x[x.sum(1) > 0].exp().mean(0),
    "nonzero": lambda x: x * (x > 0).nonzero().float().mean(),
    "item": lambda x: x + x.new_ones(int(x.abs().sum().item()) + 1, WIDTH).cos().mean(0),
    "returned": lambda x: x[x.sum(1) > 0],
}


@pytest.fixture
def captured_sizes() -> Iterator[None]:
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        yield


@pytest.mark.usefixtures("captured_sizes")
@pytest.mark.parametrize("middle", KNOWN_BY_THE_RUN)
def test_a_size_that_only_the_run_knows_is_refused_as_the_docs_say(middle: str) -> None:
    """As torch is by default it breaks the graph there, and the parts share the budget."""
    model = Around(KNOWN_BY_THE_RUN[middle])
    what = model if middle != "returned" else lambda x: model.middle(model.first(x))
    with pytest.raises(rematc.CaptureError, match="the graph has a size that depends on data"):
        compiled(what, eager("5MB"))(plain(model))


@pytest.mark.usefixtures("captured_sizes")
def test_a_number_that_only_the_run_knows_is_no_size() -> None:
    kept(lambda x: x.sin() * x.sum().item())
