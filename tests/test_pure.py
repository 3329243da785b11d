"""Custom ops run once in a step, but for those that `rematc.pure` declares to do nothing but compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from tests.test_fuzz import REFERENCE
from tests.test_graphs import WIDTH, Around, by_turns, compiled, eager, peaks, plain, step_of, unlimited

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
CALLS: list[str] = []


def op_of(name: str, scratch: int = 0) -> Any:
    """A custom op of that name; all compute the same, and count their calls.

    While it runs it takes ``scratch`` times what it returns, beside that.
    """

    @torch.library.custom_op(f"test_pure::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        CALLS.append(name)
        return x.expand(scratch, *x.shape).sin()[0].clone() if scratch else x.sin()

    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


undeclared, declared, wide = op_of("undeclared"), op_of("declared"), op_of("wide", scratch=20)


@torch.library.custom_op("test_pure::fill", mutates_args=("x",))
def fill(x: Tensor) -> None:
    x.fill_(1)


@torch.library.custom_op("test_pure::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("rematc.pure"), "_DECLARED", set())


class Net(nn.Module):
    """Layers with the op after each, which keep its results or make them again."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lines = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = self.op(line(x))
        return x.square().mean()


def steps_of(op: Any, backend: Any) -> tuple[list[Tensor], list[str], int]:
    """The numbers of three steps, the calls of one more, and what a step takes."""
    model: Any = Net(op)
    run = compiled(model, backend)
    numbers = by_turns(model, run, (plain,))
    CALLS.clear()
    step_of(model, run, plain(model))
    calls = list(CALLS)
    return numbers, calls, max(peaks(model, run, (plain,)))


def least_budget(op: Any) -> int:
    with pytest.raises(rematc.BudgetError) as refused:
        compiled(Net(op), eager(1))(torch.ones(256, WIDTH))
    return refused.value.minimum_bytes


def test_an_op_that_is_declared_pure_is_recomputed_to_the_same_bits() -> None:
    assert rematc.pure(declared) is declared
    least = least_budget(declared)
    found, calls, peak = steps_of(declared, eager(least))
    expected, _, _ = steps_of(declared, "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(calls) > len(Net(declared).lines)
    assert peak <= least < least_budget(undeclared)


def test_an_op_that_is_not_declared_runs_once() -> None:
    rematc.pure(declared)
    budget = int(1.1 * least_budget(undeclared))
    found, calls, peak = steps_of(undeclared, backend := eager(budget))
    expected, _, _ = steps_of(undeclared, "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(calls) == len(Net(undeclared).lines)
    assert peak <= budget
    assert backend.plans[0].cost_ns > 0
    pins = {op.pin for op in backend.problems[0].graph.ops if "undeclared" in op.target}
    assert [str(pin).split(", ")[0] for pin in pins] == ["effect: custom op of 'test_pure'"]


@torch.library.custom_op("test_pure::count", mutates_args=("seen",))
def count(seen: Tensor, x: Tensor) -> None:
    CALLS.append("count")
    seen.add_(x.mean(0))


class Counting(nn.Module):
    """A state that a custom op writes, read before and after."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = x.exp() * self.seen.cos()
        count(self.seen, x.detach())
        return before + self.seen.sin()


def test_a_custom_op_that_writes_an_argument_does_so_once_in_a_step() -> None:
    free = unlimited(lambda _: Around(Counting()), plain)
    states = []
    for backend in (REFERENCE, tight := eager(int(0.75 * free))):
        counting = Counting()
        model = Around(counting)
        run = compiled(model, backend)
        numbers = by_turns(model, run, (plain,))
        states.append([*numbers, counting.seen.clone()])
        CALLS.clear()
        step_of(model, run, plain(model))
        assert CALLS == ["count"]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert tight.plans[0].cost_ns > 0


@pytest.mark.parametrize(("op", "count"), [(undeclared, 2), (declared, 1)])
def test_calls_that_look_the_same_are_one_only_where_the_op_is_declared(op: Any, count: int) -> None:
    rematc.pure(declared)
    run = torch.compile(lambda x: (op(x) * op(x)).sum(), backend=eager("1GB"))
    run(torch.ones(4, requires_grad=True)).backward()
    CALLS.clear()
    run(torch.ones(4, requires_grad=True)).backward()
    assert len(CALLS) == count


def test_what_is_declared_between_two_compilations_counts_from_the_second_on() -> None:
    """The plan that was kept for the op as it was is not that of the op as it is."""
    budget = least_budget(undeclared)
    before = eager(budget)
    steps_of(undeclared, before)
    rematc.pure(undeclared)
    _, calls, _ = steps_of(undeclared, after := eager(budget - 1))
    assert len(calls) > len(Net(undeclared).lines)
    assert after.problems[0].digest != before.problems[0].digest


def test_a_name_of_torch_ops_will_do() -> None:
    assert rematc.pure(torch.ops.test_pure.declared) is torch.ops.test_pure.declared
    assert rematc.pure(torch.ops.test_pure.wide.default) is torch.ops.test_pure.wide.default
    assert least_budget(declared) < least_budget(undeclared)


def test_what_a_pure_op_takes_while_it_runs_is_counted() -> None:
    """It does no harm to run it once to find out."""
    rematc.pure(wide)
    _, calls, peak = steps_of(wide, backend := eager("2MB"))
    assert len(calls) >= len(Net(wide).lines)
    assert peak <= backend.plans[0].peak_bytes


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (fill, "writes into its arguments"),
        (noise, "draws random numbers"),
        (torch.ops.aten.add_.Tensor, "writes into its arguments"),
        (torch.ops.aten.bernoulli.default, "draws random numbers"),
        (torch.sin, "no op of torch"),
        (lambda x: x, "no op of torch"),
        ("test_pure::declared", "no op of torch"),
    ],
    ids=[
        "writes",
        "random",
        "torch's own that writes",
        "torch's own, random",
        "torch.sin",
        "function",
        "name",
    ],
)
def test_what_can_t_be_pure_is_refused(op: Any, why: str) -> None:
    with pytest.raises(rematc.OptionError, match=why):
        rematc.pure(op)
