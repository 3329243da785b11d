"""A step like the one before is not looked at as a new one: what changes afterwards is seen all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.steps import Steps

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MANY = 6  # steps until surveys are through, and then some


class Loop:
    """A model that trains, and what a test keeps of it; ``has_logits``: it returns them beside the loss."""

    def __init__(self, has_logits: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 512))
        self.other = nn.Linear(16, 64)
        self.backend = rematc.backend("1GB", inner="eager", costs="roofline")
        self.run = torch.compile(lambda x: self.judged(self.model, x), backend=self.backend)
        self.run_other = torch.compile(lambda x: self.judged(self.other, x), backend=self.backend)
        self.x, self.kept, self.has_logits = torch.randn(64, 16), list[Any](), has_logits

    def judged(self, model: nn.Module, x: Tensor) -> tuple[Tensor | None, Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        return logits if self.has_logits else None, loss

    def forward(self) -> tuple[Tensor | None, Tensor]:
        logits, loss = self.run(self.x)
        return logits, loss

    def step(self, accumulate: bool = False) -> Tensor | None:
        logits, loss = self.forward()
        loss.backward()
        if not accumulate:
            self.model.zero_grad(set_to_none=True)
        return logits


def accumulating(loop: Loop) -> None:
    for _ in range(3):
        loop.step(accumulate=True)


def logits_kept(loop: Loop) -> None:
    for _ in range(3):
        loop.kept.append(loop.step())


def two_at_once(loop: Loop) -> None:
    for _ in range(2):
        (_, first), (_, second) = loop.forward(), loop.forward()
        (first + second).backward()
        loop.model.zero_grad(set_to_none=True)


def one_that_is_held(loop: Loop) -> None:
    loop.kept.append(loop.forward())
    for _ in range(2):
        loop.step()


def one_that_is_dropped(loop: Loop) -> None:
    loop.forward()
    loop.step()


def another_in_turns(loop: Loop) -> None:
    for _ in range(3):
        loop.step()
        loop.run_other(loop.x)[1].backward()


def both_in_one_step(loop: Loop) -> None:
    for _ in range(3):
        (loop.forward()[1] + loop.run_other(loop.x)[1]).backward()
        loop.model.zero_grad(set_to_none=True)


def other_memory(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.data = p.data.clone()
    loop.step()


def no_change(loop: Loop) -> None:
    loop.step()


CHANGES = [
    accumulating, logits_kept, two_at_once, one_that_is_held, one_that_is_dropped, another_in_turns,
    both_in_one_step, other_memory, no_change,
]  # fmt: skip


def found(change: Callable[[Loop], None], has_logits: bool) -> tuple[Any, ...]:
    """All that is known of a loop after a change, and a few steps more."""
    torch._dynamo.reset()
    loop = Loop(has_logits)
    for _ in range(MANY):
        loop.step()
    before = loop.backend.problems[0].resident_bytes
    change(loop)
    for _ in range(2):
        loop.step()
    backend = loop.backend
    plans = [(plan.saved, plan.backward, plan.peak_bytes) for plan in backend.plans]
    resident = [problem.resident_bytes for problem in backend.problems]
    (steps,) = backend.threads.steps
    calls = steps.calls
    counts = len(calls.running), len(calls.held), len(calls.left), len(calls.kinds), calls.left_stays
    return before, plans, resident, backend.outside, backend.resident_bytes, counts


@pytest.mark.parametrize("has_logits", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_planned_as_if_each_step_were_looked_at(
    change: Callable[[Loop], None], has_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened = found(change, has_logits)
    monkeypatch.setattr(Steps, "_goes_on", lambda *_: False)
    rematc.backend("1GB", inner="eager", costs="roofline").threads.steps.clear()
    monkeypatch.setattr("rematc.meters._Profiler.was_taken", False)
    assert found(change, has_logits) == shortened


def test_gradients_that_accumulate_from_then_on_are_resident() -> None:
    before, _, (after,), *_ = found(accumulating, has_logits=True)
    assert after == before + sum(4 * p.numel() for p in Loop().model.parameters())


def test_most_steps_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, looked_at, begin = Loop(), list[int](), Steps._begin

    def counted(self: Steps, graph: Any, args: Any) -> None:
        looked_at.append(1)
        begin(self, graph, args)

    monkeypatch.setattr(Steps, "_begin", counted)
    for _ in range(3 * MANY):
        loop.step()
    assert 3 <= len(looked_at) <= MANY


@pytest.mark.parametrize(
    ("name", "value"),
    [("held", [0]), ("left", [0]), ("kinds", {0: 0}), ("is_retraced", True), ("running", [])],
)
def test_what_is_there_of_other_steps_has_the_next_one_looked_at(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    loop.step()
    (steps,) = loop.backend.threads.steps
    calls, (last,) = steps.calls, steps.calls.running
    with monkeypatch.context() as patch:
        patch.setattr(calls, name, value)
        assert not calls.repeats(last.graph)
    assert not calls.repeats(Any)  # another graph
    assert calls.running == [last]
    assert calls.repeats(last.graph)
    assert not calls.running
