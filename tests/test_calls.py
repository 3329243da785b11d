"""What a step is: which calls are open, held from earlier steps, or over; and gradients that are there."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematc
from rematc.measure import measure
from tests.blocks import (
    WIDTH,
    Model,
    batch,
    count_compiles,
    gradients,
    made,
    peak,
    resident,
    step_of,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


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
    model, run = made(how, backend)
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


@pytest.mark.parametrize(("how", "before"), [("one graph", 0), ("blocks", 0), ("blocks", 3)])
def test_results_that_somebody_holds_are_counted_and_end_no_sharing(
    how: str, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``before``: so many steps were planned for and run before somebody holds a result."""
    budget = 2_600_000
    backend = rematc.backend(budget, inner="eager")
    model, run = made(how, backend)
    for _ in range(before):
        step_of(model, run)()
    with caplog.at_level(logging.WARNING, "rematc"):
        held = run(batch())
        kept = measure(lambda: run(batch()), warmup=1).end_bytes
        for _ in range(3):
            step_of(model, run)()
    assert "results of earlier forward passes are held" in caplog.text
    measured = kept + peak(model, run)
    assert measured <= max(plan.peak_bytes for plan in backend.plans) <= budget
    assert held.grad_fn is not None
    assert len(backend.threads.steps[0].calls.running) == (1 if how == "one graph" else 4)


def test_what_is_held_is_planned_for_anew_only_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = count_compiles(monkeypatch)
    model, run = made("one graph", rematc.backend(2_150_000, inner="eager"))
    step_of(model, run)()
    held = [run(batch())]
    step_of(model, run)()
    compiled = len(seen)
    held.append(run(batch()))
    step_of(model, run)()
    assert (compiled, len(seen)) == (1, 2)


def test_held_results_that_leave_too_little_are_refused() -> None:
    model, run = made("one graph", rematc.backend(1_500_000, inner="eager"))
    held = [run(batch()) for _ in range(8)]
    step_of(model, run)()  # of which they were the beginning, for all that is known
    with pytest.raises(rematc.BudgetError) as refused:
        step_of(model, run)()
    assert refused.value.resident_bytes > resident(model)
    assert len(held) == 8


def test_a_checkpoint_around_compiled_blocks_runs_them_again_as_they_were_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    budget = 1_500_000
    model, plain = made("blocks", rematc.backend(budget, inner="eager"))
    step_of(model, plain)()
    assert "as under a torch.utils.checkpoint" not in caplog.text

    def run(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    expected = gradients(model, Model.forward.__get__(model))
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, run), expected, strict=True))
    assert caplog.text.count("as under a torch.utils.checkpoint") == 1
    assert peak(model, run) <= budget


def test_what_rematc_does_is_not_compiled_where_a_compiled_function_calls_autograd(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Dynamo looks into what autograd calls from there: hooks were graphs, and ran as part of a step."""
    model = Model(broken=False)
    weights = list(model.parameters())
    backend = rematc.backend(1_500_000, inner="eager")
    run = torch.compile(lambda x: torch.autograd.grad(model(x), weights), backend=backend)
    with caplog.at_level(logging.WARNING, "rematc"):
        for _ in range(3):
            found = run(batch())
    expected = torch.autograd.grad(model(batch()), weights)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not caplog.records and len(backend.plans) == 1


def test_an_update_that_runs_in_backward_is_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    backend = rematc.backend(3_000_000, inner="eager")
    model, run = made("one graph", backend)
    update = torch.compile(lambda p, g: p.sub_(g, alpha=0.1), backend=backend)

    def step(p: Tensor) -> None:
        with torch.no_grad():
            update(p, p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with caplog.at_level(logging.WARNING, "rematc"):
        for _ in range(2):
            run(batch()).backward()
    assert not caplog.records


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
    assert {len(kind.calls) for kind in backend.threads.steps[0].calls.kinds.values()} == {4}


class TwoViews(nn.Module):
    """Returns a value and a view of it, to which autograd gives a node of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.line(x.sin()).exp()
        return y, y.view(-1)


def test_a_result_that_is_a_view_of_another_belongs_to_the_same_call() -> None:
    backend = rematc.backend(1_000_000, inner="eager")
    model = TwoViews()
    run = torch.compile(model, backend=backend)
    for _ in range(3):
        _, view = run(batch())
        assert [call.is_open for call in backend.threads.steps[0].calls.running] == [True]
        view.sum().backward()
        assert [call.is_open for call in backend.threads.steps[0].calls.running] == [False]
    expected = torch.autograd.grad(model(batch())[1].sum(), model.line.bias)[0]
    torch.testing.assert_close(model.line.bias.grad, 3 * expected)
