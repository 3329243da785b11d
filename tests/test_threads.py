"""Threads that compile and train at once, with a backend each and with one for all: as each does alone."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc import plans
from rematc.measure import measure
from tests.small import batch, eager, same_bits
from tests.test_safety import assert_whole

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Trained:
    """A model and its loss as one function, of some depth; each has a backend of its own."""

    def __init__(self, depth: int, budget_bytes: int) -> None:
        torch.manual_seed(depth)
        blocks = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(depth))
        self.model, self.x = nn.Sequential(*blocks), batch()
        self.backend, self.budget_bytes = eager(budget_bytes), budget_bytes
        self.run = torch.compile(lambda x: self.model(x).square().mean(), backend=self.backend)

    def step(self) -> None:
        self.model.zero_grad()
        self.run(self.x).backward()

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def least(depth: int) -> int:
    with pytest.raises(rematc.BudgetError) as refused:
        Trained(depth, 1).step()
    torch._dynamo.reset()
    return refused.value.minimum_bytes


def in_threads(steps: list[Callable[[], None]]) -> None:
    """All begin at once."""
    ready, failed = threading.Barrier(len(steps)), list[BaseException]()

    def run(step: Callable[[], None]) -> None:
        ready.wait()
        try:
            step()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_threads_that_compile_different_models_at_once_train_as_each_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = {depth: least(depth) * 11 // 10 for depth in (2, 3, 4)}
    expected = {depth: Trained(depth, budgets[depth]) for depth in budgets}
    for alone in expected.values():
        alone.step()
    torch._dynamo.reset()
    shutil.rmtree(folder / "plans")
    trained = {depth: Trained(depth, budgets[depth]) for depth in budgets}
    in_threads([each.step for each in trained.values()])
    for depth, each in trained.items():
        assert same_bits(each.gradients, expected[depth].gradients)
        (plan,), (problem,) = each.backend.plans, each.backend.problems
        assert plan.cost_ns > 0 and each.backend.resident_bytes < plan.peak_bytes <= each.budget_bytes
        each.model.zero_grad()
        assert each.backend.resident_bytes + measure(each.step).peak_bytes <= each.budget_bytes
        kept = plans.load(problem, each.backend.options.solve, folder)
        assert kept is not None and (kept.saved, kept.backward) == (plan.saved, plan.backward)
    assert_whole(folder, caplog)


class Sharing:
    """One function and one backend for several threads, each with a model of its own."""

    def __init__(self, depths: tuple[int, ...], backend: Any) -> None:
        self.run = torch.compile(lambda model, x: model(x).square().mean(), backend=backend)
        self.models = [Trained(depth, 1).model for depth in depths]
        self.gradients: list[list[Tensor]] = [[] for _ in depths]

    def train(self, number: int, steps: int = 3) -> None:
        """Gradients, which no thread writes where another does."""
        model = self.models[number]
        for _ in range(steps):
            self.gradients[number] += torch.autograd.grad(self.run(model, batch()), list(model.parameters()))

    def peak_bytes(self, number: int) -> int:
        """Of one more step, measured in this thread; its model is there before, its batch is made in it."""
        self.gradients[number].clear()
        there = sum(p.nbytes for p in self.models[number].parameters())
        return there + measure(partial(self.train, number, 1)).peak_bytes


@pytest.mark.parametrize("depths", [(2, 2), (2, 3)], ids=["one graph", "two graphs"])
def test_threads_that_share_a_backend_train_as_each_alone(depths: tuple[int, ...]) -> None:
    alone = Sharing(depths, "aot_eager")
    for number in range(len(depths)):
        alone.train(number)
    budget_bytes = max(map(least, depths)) * 11 // 10
    backend = eager(budget_bytes)
    sharing = Sharing(depths, backend)
    in_threads([partial(sharing.train, number) for number in range(len(depths))])
    assert all(map(same_bits, sharing.gradients, alone.gradients))
    assert backend.plans and max(plan.cost_ns for plan in backend.plans) > 0
    assert max(plan.peak_bytes for plan in backend.plans) <= budget_bytes
    assert all(sharing.peak_bytes(number) <= budget_bytes for number in range(len(depths)))


def test_a_thread_that_is_over_is_let_go_of() -> None:
    """It may have a model and its batch; what ran its steps had it as long as the backend was there."""

    class Job(threading.Thread):
        def run(self) -> None:
            sharing.train(0)

    sharing = Sharing((2,), eager(10**9))
    job = Job()
    job.start()
    job.join()
    there = weakref.ref(job)
    del job
    gc.collect()
    assert sharing.gradients[0] and there() is None


def of_threads(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "rematc.threads"]


def test_steps_that_are_open_at_once_in_two_threads_are_planned_apart_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    budget_bytes = least(2) * 11 // 10
    backend = eager(budget_bytes)
    sharing = Sharing((2, 2), backend)
    losses: dict[int, Tensor] = {}

    def forward(number: int) -> None:
        losses[number] = sharing.run(sharing.models[number], batch())

    def backward(number: int) -> None:
        losses.pop(number).backward()

    for phase in (forward, backward, forward, backward):  # one thread after the other
        for number in range(2):
            in_threads([partial(phase, number)])
    assert len(backend.plans) == 2
    assert [message.partition(":")[0] for message in of_threads(caplog)] == [
        f"2 threads train at the same time by rematc.backend(budget={budget_bytes!r})"
    ]


def test_threads_that_train_in_turns_share_the_steps_of_one(caplog: pytest.LogCaptureFixture) -> None:
    backend = eager(least(2) * 11 // 10)
    sharing = Sharing((2,), backend)
    for _ in range(3):
        in_threads([partial(sharing.train, 0)])
    assert len(backend.plans) == 1 and not of_threads(caplog)
