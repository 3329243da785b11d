"""A joint graph whose trace has strides wrong: those that ops return are written into it, or a copy is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import rematc
from rematc import compat
from rematc.capture import capture
from rematc.costs import Call, Table
from rematc.options import Options
from rematc.passes.laid_out import lay_out
from rematc.trace import pose_model
from tests.joints import joint_of
from tests.misled import REAL, TRACED, Attended, pair

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
CPU = torch.device("cpu")


@torch.library.custom_op("test_laid_out::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@unknown.register_fake
def _(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return torch.empty_like(x)


unknown.register_autograd(lambda ctx, grad: grad)


@rematc.pure
@torch.library.custom_op("test_laid_out::cut", mutates_args=())
def cut(x: Tensor) -> Tensor:
    return x[:1].t().clone()


@cut.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)  # no such shape


cut.register_autograd(lambda ctx, grad: grad)


class LaidOut:
    """The joint graph of what ``ask`` makes of what `pair` returns second, and what was measured for it."""

    def __init__(self, ask: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> None:
        def fn(x: Tensor) -> Tensor:
            first, second = pair(x)
            return torch.as_tensor(ask(second)).float().sum() + first.exp().sum()

        x = torch.ones(4, 3, dtype=dtype, requires_grad=True)
        self.joint, self.forward_outputs = joint_of(fn, x)
        self.before = {n.name: n.meta.get("val") for n in self.joint.graph.nodes}
        self.asked: list[Call] = []
        lay_out(self.joint, self._taken)
        self.joint.graph.lint()
        self.nodes = {n.name: n for n in self.joint.graph.nodes}

    def _taken(self, calls: Iterable[Call]) -> Any:
        self.asked += (calls := list(calls))
        return Table(CPU, None).taken(calls)

    def strides(self, name: str) -> tuple[int, ...]:
        found: tuple[int, ...] = self.nodes[name].meta["val"].stride()
        return found

    def is_as_before(self, name: str) -> bool:
        return self.nodes[name].meta["val"] is self.before[name]

    def copies(self) -> list[fx.Node]:
        return [n for n in self.joint.graph.nodes if n.target is torch.ops.aten.clone.default]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_from_it_lies_otherwise_too(dtype: torch.dtype) -> None:
    found = LaidOut(lambda x: x.tanh().t().exp2().sum(), dtype)
    assert [t.stride() for t in found.nodes["pair"].meta["val"]] == [TRACED, REAL]
    names = ("getitem", "getitem_1", "exp", "tanh", "t", "exp2")
    assert [found.strides(name) for name in names] == [TRACED, REAL, TRACED, REAL, (4, 1), (4, 1)]
    assert {n.meta["val"].dtype for name in names if (n := found.nodes[name])} == {dtype}
    assert [found.is_as_before(name) for name in ("exp", "sum_1")] == [True, True]
    assert found.nodes["pair"].meta["val"][0] is found.before["pair"][0]
    assert not found.copies()


def test_what_is_computed_from_it_is_measured_as_it_is() -> None:
    asked = LaidOut(lambda x: x.tanh()).asked
    assert [c.args[0].stride() for c in asked if c.target is torch.ops.aten.tanh.default] == [TRACED, REAL]


ASKING: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda x: x.view(-1),
    "a view of a view": lambda x: x.view(2, 6)[1:].view(6),
    "the view of a copy, torch does not know for what": lambda x: unknown(x.view(-1)),
    "two views": lambda x: x.view(-1).sum() + x.view(6, 2).sum(0).sum(),
    "memory": lambda x: x.as_strided((3, 4), (4, 1)),
    "torch does not know what": lambda x: torch.ops.test_laid_out.unknown(x),
    "a graph": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),
}


@pytest.mark.parametrize("what", ASKING)
def test_what_is_there_for_the_strides_of_the_trace_gets_a_copy_that_has_them(what: str) -> None:
    found = LaidOut(ASKING[what])
    assert len(found.copies()) == (
        2 if what in ("two views", "a graph") else 1
    )  # the latter in backward again
    for copy in found.copies():
        (back,) = copy.users
        assert (back.meta["val"].stride(), back.meta["val"].shape) == (TRACED, (4, 3))
        (reader,) = back.users
        assert reader.all_input_nodes.count(back) == 1


@pytest.mark.parametrize("what", ["a view", "a view of a view", "two views"])
def test_a_view_of_a_copy_stands_in_its_memory(what: str) -> None:
    """Two that stood in what the trace had them in were counted as one, though each had a copy."""
    found = LaidOut(ASKING[what])
    views = [n for n in found.joint.graph.nodes if n.target is torch.ops.aten.view.default]
    copies = {compat.storage_key(n.meta["val"]) for n in found.copies()}
    assert len(copies) == len(found.copies())
    assert copies < {compat.storage_key(n.meta["val"]) for n in views}  # others are of gradients
    graph = capture(found.joint, found.forward_outputs).graph
    assert all(i in graph.views for i, op in enumerate(graph.ops) if op.target.startswith("aten.view"))


def test_what_the_trace_has_right_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(144, 2))
    joint, _ = joint_of(lambda x: model(x).sum(), torch.ones(2, 3, 8, 8))
    before = [n.meta.get("val") for n in joint.graph.nodes]
    lay_out(joint, Table(CPU, None).taken)
    assert all(n.meta.get("val") is val for n, val in zip(joint.graph.nodes, before, strict=True))


def test_strides_of_another_shape_say_nothing() -> None:
    joint, _ = joint_of(
        lambda x: torch.ops.test_laid_out.cut(x.sin()).sum() + x.sum(), torch.ones(4, 3).requires_grad_()
    )
    (node,) = (n for n in joint.graph.nodes if "cut" in n.name)
    before = node.meta["val"]
    lay_out(joint, Table(CPU, None).taken)
    assert node.meta["val"] is before


@rematc.pure
@torch.library.custom_op("test_laid_out::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return torch.ones(2, 3, 4) * x.sum()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(3, 4, 2).permute(2, 0, 1)  # wrong


@torch.library.custom_op("test_laid_out::read", mutates_args=())
def read(x: Tensor) -> Tensor:
    return x.clone()


@read.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_copy_has_the_strides_of_the_trace_whatever_they_are() -> None:
    read_by, made_by = torch.ops.test_laid_out.read, torch.ops.test_laid_out.turned
    joint, _ = joint_of(
        lambda x: read_by(made_by(x.detach())).sum() * x.sum(), torch.ones(2).requires_grad_()
    )
    traced = next(n.meta["val"] for n in joint.graph.nodes if n.target is made_by.default)
    lay_out(joint, Table(CPU, None).taken)
    made, reader = (next(n for n in joint.graph.nodes if n.target is op.default) for op in (made_by, read_by))
    (back,) = reader.all_input_nodes
    assert back is not made and made.meta["val"].is_contiguous()
    assert (back.meta["val"].shape, back.meta["val"].stride()) == (traced.shape, traced.stride())


def test_what_a_view_makes_of_one_dimension_is_what_its_kernel_does() -> None:
    """The rule for traces has other strides there than the kernel of torch's own."""
    joint, _ = joint_of(
        lambda x: (x.transpose(1, 2).view(1, 3, 2, 2).exp() * 2).sum(), torch.ones(1, 4, 3).requires_grad_()
    )
    view, exp = (next(n for n in joint.graph.nodes if n.name == name) for name in ("view", "exp"))
    assert view.meta["val"].stride() == exp.meta["val"].stride() == (12, 1, 6, 3)
    lay_out(joint, Table(CPU, None).taken)
    real = torch.ones(1, 4, 3).transpose(1, 2).view(1, 3, 2, 2)
    assert view.meta["val"].stride() == real.stride() == (3, 1, 6, 3)
    assert exp.meta["val"].stride() == real.exp().stride()
    assert compat.storage_key(view.meta["val"]) == compat.storage_key(view.args[0].meta["val"])  # type: ignore


def test_equal_calls_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[Any, Any]] = []

    def same(call: Call, other: Call) -> bool:
        tried.append((call.key, other.key))
        return True

    monkeypatch.setattr("rematc.passes.laid_out.computes_the_same", same)
    LaidOut(lambda x: x.tanh() + x.exp() + (x + 1).exp())
    assert len(tried) == len(set(tried)) > 2


def test_of_a_card_that_is_not_here_the_strides_are_those_of_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To see others, ops would have to run on whatever is here."""

    def run(*_: Any) -> Any:
        raise AssertionError("an op was run")

    monkeypatch.setattr(sys.modules["rematc.passes.canonicalize"], "lay_out", run)
    posed = [{"costs": "h100"}, {"costs": "roofline", "inner": "inductor"}]
    for settings in posed:
        options = replace(Options(None, "eager"), **settings)
        problem, _ = pose_model(Attended(), torch.ones(1, 3, 16, 16), None, options)
        assert problem.graph.ops
    with pytest.raises(Exception, match="an op was run"):
        pose_model(Attended(), torch.ones(1, 3, 16, 16), None, Options(None, "eager", costs="roofline"))
