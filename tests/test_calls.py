"""What a step is: which calls are open, held from earlier steps, or over; and gradients that are there."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rematc
from rematc.calls import Calls
from rematc.measure import measure
from tests.blocks import (
    WIDTH,
    Model,
    batch,
    count_compiles,
    gradients,
    made,
    one_node,
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
    assert len(backend.steps.calls.running) == (1 if how == "one graph" else 4)


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
    assert {len(kind) for kind in backend.steps.calls.kinds} == {4}


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
        assert [call.is_open for call in backend.steps.calls.running] == [True]
        view.sum().backward()
        assert [call.is_open for call in backend.steps.calls.running] == [False]
    expected = torch.autograd.grad(model(batch())[1].sum(), model.line.bias)[0]
    torch.testing.assert_close(model.line.bias.grad, 3 * expected)


# The ledger alone


def test_a_step_begins_when_the_calls_before_it_are_through() -> None:
    calls: Calls[str] = Calls()
    w = torch.ones(2, requires_grad=True)
    assert calls.begins()
    first = one_node(w)
    calls.ran("a", (w,), first, 1)
    assert not calls.begins()
    second = one_node(first, w)
    calls.ran("b", (first, w), second, 1)
    assert [call.graph for call in calls.open] == ["a", "b"]
    second.backward()
    assert calls.open == []
    assert calls.begins()
    assert list(calls.kinds) == [("a", "b")]
    assert calls.graphs == ["a", "b"]


def test_inputs_that_a_call_of_the_step_made_are_not_read_from_outside() -> None:
    calls: Calls[str] = Calls()
    w = torch.ones(4, requires_grad=True)
    first = one_node(w)
    calls.ran("a", (w,), first, 1)
    calls.ran("b", (first, w), one_node(first, w), 1)
    assert [list(call.inputs.values()) for call in calls.running] == [[16], [16]]
    assert [list(call.results.values()) for call in calls.running] == [[4], [4]]


def test_a_call_whose_results_are_gone_is_over_and_one_whose_are_held_is_carried() -> None:
    calls: Calls[str] = Calls()
    w = torch.ones(2, requires_grad=True)
    gone, held, last = one_node(w), one_node(w), one_node(w)
    calls.ran("gone", (w,), gone, 1)
    calls.ran("held", (w,), held, 1)
    calls.ran("last", (w,), last, 1)
    del gone
    last.backward()
    assert [call.graph for call in calls.open] == ["held"]
    assert calls.begins()
    assert [call.graph for call in calls.held] == ["held"]
    held.backward()
    assert calls.begins()
    assert calls.held == []


def test_a_kind_of_step_is_forgotten_with_its_model() -> None:
    calls: Calls[str] = Calls()
    w = torch.ones(2, requires_grad=True)
    loss = one_node(w)
    calls.ran("a", (w,), loss, 1)
    calls.ran("a", (w,), loss, 1)
    loss.backward()
    assert calls.begins()
    assert list(calls.kinds) == [("a", "a")]
    del w, loss
    gc.collect()
    assert calls.begins()
    assert not calls.kinds


def test_results_of_calls_that_went_back_are_followed_as_long_as_somebody_has_them() -> None:
    calls: Calls[str] = Calls()
    w = torch.ones(1024, requires_grad=True)
    first, second = one_node(w) * w, one_node(w) * w
    calls.ran("a", (w,), first, 1)
    calls.ran("b", (w,), second, 1)
    (first.sum() + second.sum()).backward()
    assert sum(call.left_bytes for call in calls.running) == 4096  # of the first that went back
    del first
    assert calls.begins()
    assert [call.graph for call in calls.left] == ["b"]
    assert [call.made.live_bytes() for call in calls.left] == [4096]
    del second
    assert calls.begins()
    assert calls.left == []


def test_what_ran_forward_in_one_step_and_went_back_in_another_is_carried() -> None:
    calls: Calls[str] = Calls()
    w = torch.ones(2, requires_grad=True)
    for _ in range(3):
        generated, real, fake = one_node(w), one_node(w), one_node(w)
        calls.begins()
        calls.ran("make", (w,), generated, 1)
        calls.ran("judge", (w,), real, 1)
        calls.ran("judge", (w,), fake, 1)
        (real + fake).backward()
        assert calls.begins()
        judged = one_node(generated, w)
        calls.ran("judge", (generated, w), judged, 1)
        judged.backward()
    assert set(calls.kinds) == {("make", "judge", "judge"), ("make", "judge")}
    together = calls.kinds["make", "judge"]
    assert (together.carried, together.begins_with) == (1, "judge")


# What is left of earlier steps


class Wide(nn.Module):
    def __init__(self, given: int, hidden: int, made: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(given, hidden), nn.Linear(hidden, made)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


def loop(budget: int, how: str) -> tuple[rematc.Backend, Callable[[], None], int]:
    """Steps in a loop, as they are commonly written: the last logits are there until there are new ones."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, labels = Wide(WIDTH, 64, 512), torch.arange(len(batch()))
    backend = rematc.backend(budget, inner="eager")

    def judged(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model(x)
        metric = torch.cat(8 * [logits.detach()], 1).square().mean() if how == "most in forward" else x
        return logits, F.cross_entropy(logits, labels), metric

    run = torch.compile(judged, backend=backend)

    def step() -> Tensor:
        logits, loss, _ = run(x)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return logits

    x = batch()

    def steps() -> None:
        for _ in range(4):
            if how == "until the step is over":
                logits = step()
            else:
                logits, loss, _ = run(x)
                loss.backward()
                model.zero_grad(set_to_none=True)
        del logits

    steps()
    return backend, steps, sum(t.nbytes for t in (*model.parameters(), x, labels))


@pytest.mark.parametrize("how", ["most in forward", "most in backward", "until the step is over"])
def test_the_logits_of_the_last_step_that_a_loop_holds_are_counted(how: str) -> None:
    backend, steps, there = loop(10**9, how)
    measured = there + measure(steps).peak_bytes
    (plan,) = backend.plans
    assert measured <= plan.peak_bytes <= 1.01 * measured
    if how != "most in forward":  # there is nothing to gain
        budget = int(0.97 * measured)
        backend, steps, there = loop(budget, how)
        assert there + measure(steps).peak_bytes <= backend.plans[0].peak_bytes <= budget


def test_a_gradient_that_one_graph_hands_to_another_is_counted_once() -> None:
    """As that of the logits, where the loss is a graph of its own."""
    backend = rematc.backend("1GB", inner="eager")
    torch.manual_seed(0)
    model, labels, x = Wide(WIDTH, 64, 512), torch.arange(len(batch())), batch()
    logits_of = torch.compile(model, backend=backend)
    loss_of = torch.compile(F.cross_entropy, backend=backend)

    def step() -> None:
        logits = logits_of(x)
        loss_of(logits, labels).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    there = sum(t.nbytes for t in (*model.parameters(), x, labels))
    measured = there + measure(step).peak_bytes
    assert measured <= max(plan.peak_bytes for plan in backend.plans) <= 1.01 * measured
    (kind,) = backend.steps.calls.kinds.values()
    assert [kind.twice_bytes(turn) for turn in (0, 1)] == [4 * 512 * len(x), 0]


@pytest.mark.parametrize("how", ["part of a larger one", "of a leaf"])
def test_a_gradient_that_does_not_go_is_counted_to_the_end(how: str) -> None:
    backend = rematc.backend("1GB", inner="eager")
    torch.manual_seed(0)
    most, narrow, x = Wide(16, 4000, 1000), nn.Linear(1000, 4), torch.randn(256, 16)
    make = torch.compile(lambda x: most(x).sin(), backend=backend)
    others = torch.randn(3000, 1000)

    def judged(made: Tensor) -> Tensor:
        loss: Tensor = narrow(torch.cat([made, others])).square().mean()
        return loss

    judge = torch.compile(judged, backend=backend)
    models = nn.ModuleList([most, narrow])

    def step() -> None:
        made = make(x)
        if how == "of a leaf":
            leaf = made.detach().requires_grad_()
            judge(leaf).backward()
            made.backward(leaf.grad)
        else:
            judge(made).backward()
        models.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    there = sum(t.nbytes for t in (*models.parameters(), x, others))
    assert there + measure(step).peak_bytes <= max(plan.peak_bytes for plan in backend.plans)


@pytest.mark.parametrize("held", [False, True])
def test_a_gan_keeps_its_budget(held: bool) -> None:
    """Its generator goes back beside what the discriminator's last call left, and beside its logits."""

    def trained(budget: int) -> tuple[int, int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        backend = rematc.backend(budget, inner="eager")
        make, judge = Wide(16, 512, WIDTH), Wide(WIDTH, 256, 128)
        made_by, judged_by = (torch.compile(model, backend=backend) for model in (make, judge))
        noise, real, logged = torch.randn(256, 16), batch(), {}

        def step() -> None:
            fake = made_by(noise)
            of_real, of_fake = judged_by(real), judged_by(fake.detach())
            (F.softplus(-of_real).mean() + F.softplus(of_fake).mean()).backward()
            judge.zero_grad(set_to_none=True)
            of_made = judged_by(fake)
            F.softplus(-of_made).mean().backward()
            make.zero_grad(set_to_none=True)
            judge.zero_grad(set_to_none=True)
            if held:
                logged.update(of_real=of_real, of_fake=of_fake, of_made=of_made)

        for _ in range(6):
            step()
        there = [*make.parameters(), *judge.parameters(), noise, real, *logged.values()]
        measured = sum(t.nbytes for t in there) + measure(step).peak_bytes
        return measured, max(plan.peak_bytes for plan in backend.plans)

    free, predicted = trained(10**9)
    assert free <= predicted <= 1.3 * free
    budget = int(0.95 * predicted)
    measured, predicted = trained(budget)
    assert measured <= predicted <= budget
