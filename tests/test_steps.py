"""A step of several graphs, by graph breaks or block by block: one budget for all, and the same gradients."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rematc
from rematc.backend import Backend
from rematc.measure import measure

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

WIDTH, ROWS = 32, 256


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Four blocks, and a graph break where it is asked for."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(Block(), Block()) for _ in range(2))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.first, *self.second]


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def made(how: str, backend: Backend) -> tuple[Model, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = Model(broken=how == "graph break")
    if how == "graph break":
        return model, torch.compile(model, backend=backend)
    for block in model.blocks:
        block.compile(backend=backend if how == "blocks" else Backend(backend.options))
    return model, model


def resident(model: nn.Module) -> int:
    return 4 * (sum(p.numel() for p in model.parameters()) + ROWS * WIDTH)


def step_of(model: nn.Module, run: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    x = batch()

    def step() -> None:
        run(x).backward()
        model.zero_grad(set_to_none=True)

    return step


def peak(model: nn.Module, run: Callable[[Tensor], Tensor]) -> int:
    return resident(model) + measure(step_of(model, run)).peak_bytes


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    run(batch()).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("how", "budget"),
    [
        ("graph break", 1_200_000),
        ("blocks", 1_200_000),
        ("blocks", 1_400_000),
        ("a backend for each", 1_400_000),
    ],
)
def test_the_budget_holds_for_all_graphs_together(how: str, budget: int) -> None:
    model, alone = made(how, rematc.backend(None, inner="eager"))
    step_of(model, alone)()
    free, expected = peak(model, alone), gradients(model, alone)
    torch._dynamo.reset()
    backend = rematc.backend(budget, inner="eager")
    model, run = made(how, backend)
    for _ in range(2):
        step_of(model, run)()
    measured = [peak(model, run) for _ in range(2)]
    assert max(measured) <= budget < free
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, run), expected, strict=True))
    if how != "a backend for each":
        assert len(backend.plans) == 2
        assert max(measured) <= max(plan.peak_bytes for plan in backend.plans) <= budget
        assert sum(plan.cost_ns for plan in backend.plans) > 0


def test_under_inductor_too() -> None:
    backend = rematc.backend(1_150_000)
    model, run = made("blocks", backend)
    expected = gradients(model, Model.forward.__get__(model))
    for _ in range(2):
        step_of(model, run)()
    assert peak(model, run) <= max(plan.peak_bytes for plan in backend.plans) <= 1_150_000
    for ours, theirs in zip(gradients(model, run), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("how", ["graph break", "blocks"])
def test_a_budget_that_is_too_small_for_all_is_refused_with_one_that_is_not(how: str) -> None:
    model, run = made(how, rematc.backend(700_000, inner="eager"))
    step_of(model, run)()
    with pytest.raises(rematc.BudgetError, match="graphs in one step") as refused:
        step_of(model, run)()
    torch._dynamo.reset()
    least = refused.value.minimum_bytes
    model, run = made(how, rematc.backend(least, inner="eager"))
    for _ in range(2):
        step_of(model, run)()
    assert peak(model, run) <= least


def test_a_first_step_above_the_budget_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, run = made("blocks", rematc.backend(700_000, inner="eager"))
    with caplog.at_level(logging.WARNING, "rematc"):
        step_of(model, run)()
    assert "one step runs several graphs, and this first one needs" in caplog.text


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    compiler = rematc.backend.__globals__["_Compiler"]
    original = compiler.__call__

    def counted(self: Any, inputs: Any, given: Any) -> Any:
        seen.append(given)
        return original(self, inputs, given)

    monkeypatch.setattr(compiler, "__call__", counted)
    return seen


def test_one_graph_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_compiles(monkeypatch)
    model = Model()
    run = torch.compile(model, backend=rematc.backend(1_500_000, inner="eager"))
    for _ in range(4):
        step_of(model, run)()
    assert len(seen) == 1


def test_what_fits_as_it_is_is_not_compiled_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_compiles(monkeypatch)
    model, run = made("blocks", rematc.backend(1_500_000, inner="eager"))
    for _ in range(2):
        step_of(model, run)()
    compiled = len(seen)
    assert 2 < compiled <= 4  # two graphs, first alone, then with their shares where those are others
    for _ in range(3):
        step_of(model, run)()
    assert len(seen) == compiled


def test_two_models_one_after_the_other_are_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_compiles(monkeypatch)
    backend = rematc.backend(1_500_000, inner="eager")
    models = [Model(), Model()]
    runs = [torch.compile(model, backend=backend) for model in models]
    for _ in range(3):
        for model, run in zip(models, runs, strict=True):
            step_of(model, run)()
    assert len(seen) == 1  # and it is the same code for both


def test_a_forward_pass_that_nobody_differentiates_ends_with_its_results() -> None:
    model, run = made("blocks", rematc.backend(1_300_000, inner="eager"))
    step_of(model, run)()
    loss = run(batch())
    del loss
    gc.collect()
    for _ in range(2):
        step_of(model, run)()
    assert peak(model, run) <= 1_300_000


def test_evaluation_in_between_changes_nothing() -> None:
    model, run = made("blocks", rematc.backend(1_300_000, inner="eager"))
    for _ in range(2):
        step_of(model, run)()
        with torch.no_grad():
            run(batch())
    assert peak(model, run) <= 1_300_000


def test_gradients_that_accumulate_are_the_same() -> None:
    model, run = made("graph break", rematc.backend(1_500_000, inner="eager"))
    for _ in range(3):
        run(batch()).backward()
    found = [p.grad for p in model.parameters()]
    one = gradients(model, run)
    for accumulated, single in zip(found, one, strict=True):
        assert accumulated is not None
        torch.testing.assert_close(accumulated, 3 * single)


@pytest.mark.parametrize("how", ["one graph", "blocks"])
def test_gradients_that_are_added_to_are_found_out_and_counted(how: str) -> None:
    budget = 1_500_000
    backend = rematc.backend(budget, inner="eager")
    if how == "blocks":
        model, run = made(how, backend)
    else:
        model = Model()
        run = torch.compile(model, backend=backend)
    x = batch()

    def accumulate() -> None:
        run(x).backward()

    for _ in range(3):
        accumulate()
    gradients_bytes = 4 * sum(p.numel() for p in model.parameters())
    measured = resident(model) + gradients_bytes + measure(accumulate).peak_bytes
    assert max(plan.peak_bytes for plan in backend.plans) - gradients_bytes < measured <= budget
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    accumulate()
    for four, p in zip(expected, model.parameters(), strict=True):
        assert four is not None and p.grad is not None
        torch.testing.assert_close(four, 4 * p.grad)


def test_gradients_to_come_can_be_told_of() -> None:
    model = Model()
    told = rematc.backend(1_500_000, inner="eager", accumulate=True)
    torch.compile(model, backend=told)(batch()).backward()
    gradients_bytes = 4 * sum(p.numel() for p in model.parameters())
    torch._dynamo.reset()
    blind = rematc.backend(1_500_000, inner="eager", accumulate=False)
    for _ in range(2):
        torch.compile(model, backend=blind)(batch()).backward()
    assert told.problems[0].resident_bytes == blind.problems[0].resident_bytes + gradients_bytes
    with pytest.raises(rematc.OptionError, match="accumulate='yes'"):
        rematc.backend(1_500_000, accumulate="yes")  # type: ignore[arg-type]


def test_two_kinds_of_steps_keep_one_budget() -> None:
    """As of a GAN: the second model's graphs run after the first's, or alone."""
    budget = 1_500_000
    backend = rematc.backend(budget, inner="eager")
    torch.manual_seed(0)
    first, second = Model().first, nn.Sequential(Model().second, nn.Linear(WIDTH, 8))
    first.compile(backend=backend)
    second.compile(backend=backend)
    x = batch()

    def together() -> None:
        second(first(x)).square().mean().backward()

    def alone() -> None:
        second(x).square().mean().backward()

    there = 4 * (sum(p.numel() for m in (first, second) for p in m.parameters()) + x.numel())
    for step in (together, alone) * 3:
        step()
        first.zero_grad()
        second.zero_grad()
    for step in (together, alone):
        assert there + measure(step).peak_bytes <= budget
        first.zero_grad()
        second.zero_grad()


def test_a_step_that_took_too_much_before_it_was_known_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, run = made("blocks", rematc.backend(1_200_000, inner="eager"))
    step_of(model, run)()
    with caplog.at_level(logging.WARNING, "rematc"):
        step_of(model, run)()
    assert "above the budget: now they share it" in caplog.text


def test_results_that_somebody_holds_are_counted_and_do_not_end_the_sharing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    budget = 2_600_000
    backend = rematc.backend(budget, inner="eager")
    model, run = made("blocks", backend)
    with caplog.at_level(logging.WARNING, "rematc"):
        held = run(batch())
        kept = measure(lambda: run(batch()), warmup=1).end_bytes
        for _ in range(3):
            step_of(model, run)()
    assert "results of earlier forward passes are held" in caplog.text
    assert kept + peak(model, run) <= budget
    assert held.grad_fn is not None
    assert len(backend._steps.calls) == 4


def test_a_checkpoint_around_compiled_blocks_runs_them_again_as_they_were() -> None:
    model, _ = made("blocks", rematc.backend(1_500_000, inner="eager"))

    def run(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    expected = gradients(model, Model.forward.__get__(model))
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, run), expected, strict=True))


def test_a_forward_pass_that_failed_is_no_step() -> None:
    budget = 1_300_000
    backend = rematc.backend(budget, inner="eager")
    model, run = made("blocks", backend)

    def fails(x: Tensor) -> Tensor:
        x = model.blocks[0](x)
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fails(batch())
        step_of(model, run)()
    assert peak(model, run) <= budget
    assert {len(kind) for kind in backend._steps.kinds.values()} == {4}
