"""What lies outside of the compiled graphs: found in the first steps, and then planned for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

import rematc
from rematc.allocations import Span
from rematc.compat_profiler import profiler_is_active
from rematc.measure import measure
from rematc.survey import CudaMeter, Outside, Survey, give_way, survey_of
from tests.blocks import Block, Model, batch, gradients, made, step_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

CLASSES, WIDTH, ROWS = 500, 32, 256
LOGITS = 4 * CLASSES * ROWS


class Classifier(nn.Module):
    """Its loss is not in it: the logits are larger than all that its blocks keep."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


def labels() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def training(backend: Any) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model, x, y = Classifier(), batch(), labels()
    run = model if backend is None else torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad()
        logits = run(x)
        F.cross_entropy(logits, y).backward()

    return model, step


def gradients_of(backend: Any) -> list[Tensor]:
    model, step = training(backend)
    step()
    return [p.grad for p in model.parameters() if p.grad is not None]


def peak_above_resident(model: nn.Module, step: Callable[[], None]) -> int:
    step()
    model.zero_grad()
    return measure(step).peak_bytes


def needed(inner: Any = "eager") -> tuple[int, int]:
    """The smallest budget, and what a step takes that is not limited."""
    torch._dynamo.reset()
    free = rematc.backend("1GB", inner=inner)
    _, step = training(free)
    step()
    torch._dynamo.reset()
    _, step = training(rematc.backend(free.plans[0].peak_bytes // 2, inner=inner))
    step()
    with pytest.raises(rematc.BudgetError) as refused:
        step()
    torch._dynamo.reset()
    return refused.value.minimum_bytes, free.plans[0].peak_bytes


@pytest.mark.parametrize(
    ("share", "inner"), [(0.0, "eager"), (0.5, "eager"), (1.0, "eager"), (0.2, "inductor")]
)
def test_a_loss_outside_of_the_graph_is_within_the_budget_from_the_second_step_on(
    share: float, inner: Any
) -> None:
    low, high = needed(inner)
    budget = int(low + share * (high - low))
    backend = rematc.backend(budget, inner=inner)
    model, step = training(backend)
    step()
    there = backend.resident_bytes
    measured = [there + peak_above_resident(model, step) for _ in range(2)]
    assert max(measured) <= backend.plans[0].peak_bytes <= budget
    assert backend.plans[0].peak_bytes - max(measured) <= 64  # numbers
    assert (backend.plans[0].cost_ns > 0) == (share < 1)
    assert backend.outside[0].meanwhile_bytes > 2 * LOGITS
    for ours, theirs in zip(gradients_of(backend), gradients_of(None), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_was_not_known_in_the_first_step_is_said_there(caplog: pytest.LogCaptureFixture) -> None:
    low, high = needed()
    _, step = training(rematc.backend((low + high) // 2, inner="eager"))
    with caplog.at_level(logging.WARNING, "rematc"):
        step()
    assert "are taken outside of the compiled graph" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rematc"):
        for _ in range(4):
            step()
    assert not caplog.text


def test_a_budget_that_the_loss_breaks_is_refused_and_the_one_named_is_kept() -> None:
    low, _ = needed()
    _, step = training(rematc.backend(low - 1, inner="eager"))
    step()
    with pytest.raises(rematc.BudgetError, match="what runs between forward and backward") as refused:
        step()
    assert refused.value.minimum_bytes == low
    assert refused.value.largest[0][0] == "what is taken outside of the graph"
    assert "the loss compiled with the model" in str(refused.value)


def test_a_loss_in_the_graph_leaves_nothing_outside() -> None:
    backend = rematc.backend("1GB", inner="eager")
    model, run = made("one graph", backend)
    for _ in range(2):
        step_of(model, run)()
    assert backend.outside[0].held_bytes == 0
    assert backend.outside[0].meanwhile_bytes <= 8  # where its gradient begins


def test_hooks_and_what_is_held_count() -> None:
    """Log-probabilities that somebody looks at are there while backward runs; what a hook makes is not."""
    backend = rematc.backend("1GB", inner="eager")
    model, x, y = Classifier(), batch(), labels()
    run = torch.compile(model, backend=backend)
    for _ in range(2):
        logits = run(x)
        logits.register_hook(lambda g: (g.double() * 1).float())
        log_probs = F.log_softmax(logits, 1)
        F.nll_loss(log_probs, y).backward()
        del logits
    assert backend.outside[0].held_bytes >= LOGITS
    assert backend.outside[0].held_bytes + backend.outside[0].meanwhile_bytes >= 5 * LOGITS
    assert log_probs.shape == (ROWS, CLASSES)


def test_eager_code_between_blocks_is_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps tensors for its own backward pass, which the blocks know nothing of."""

    class Between(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x).exp().log().sin()
            return x.square().mean()

    def run_with(budget: int) -> tuple[rematc.Backend, Callable[[], None], nn.Module]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        backend = rematc.backend(budget, inner="eager")
        model = Between()
        for block in model.blocks:
            block.compile(backend=backend)
        return backend, step_of(model, model), model

    backend, step, model = run_with(10**9)
    for _ in range(5):
        step()
    free = max(plan.peak_bytes for plan in backend.plans)
    measured = backend.resident_bytes + measure(step, warmup=1).peak_bytes
    assert measured <= free
    eager_keeps = 3 * 2 * 4 * batch().numel()  # of three blocks, what `exp` and `log` made
    assert max(outside.held_bytes for outside in backend.outside) >= eager_keeps
    budget = int(0.8 * free)
    backend, step, model = run_with(budget)
    for _ in range(6):
        step()
    assert backend.resident_bytes + measure(step, warmup=1).peak_bytes <= budget
    expected = gradients(model, Between.forward.__get__(model))
    found = gradients(model, model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gradients_are_the_same_where_the_user_names_parts_of_a_step() -> None:
    """A profile that ends inside of a `record_function` must not be followed by one there."""
    backend = rematc.backend("1GB", inner="eager")
    torch.manual_seed(0)
    model, x, y = Classifier(), batch(), labels()
    blocks = list(model.blocks)
    for block in blocks:
        block.compile(backend=backend)
    expected = gradients_of(None)
    for _ in range(8):
        model.zero_grad()
        with record_function("a step"):
            with record_function("forward"):
                out = model(x)
            with record_function("loss"):
                loss = F.cross_entropy(out, y)
            with record_function("backward"):
                loss.backward()
        for p, theirs in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, theirs)


def test_the_profiler_is_left_alone() -> None:
    """It is free after a step, after results that nobody wants, and for whoever has it already."""
    _, step = training(rematc.backend("1GB", inner="eager"))
    step()
    assert not profiler_is_active()
    model = Classifier()
    run = torch.compile(model, backend=rematc.backend("1GB", inner="eager"))
    out = run(batch())
    assert profiler_is_active()
    assert measure(lambda: torch.ones(8).sum()).peak_bytes >= 32  # it gives way
    assert not profiler_is_active()
    del out
    out = run(batch())
    del out
    assert not profiler_is_active()
    with torch.profiler.profile(profile_memory=True):
        F.cross_entropy(run(batch()), labels()).backward()
    F.cross_entropy(run(batch()), labels()).backward()
    assert not profiler_is_active()


def test_the_user_s_own_profiles_are_whole_wherever_they_begin() -> None:
    """One in its warm-up is not active yet; and one may begin between the passes, where a survey measures."""
    _, step = training(rematc.backend("1GB", inner="eager"))
    plan = torch.profiler.schedule(wait=0, warmup=1, active=2)
    with torch.profiler.profile(schedule=plan) as own:
        for n in range(3):
            step()
            if n < 2:  # one more would begin anew, with a warning
                own.step()
    assert len(own.events()) > 20
    torch._dynamo.reset()
    run = torch.compile(Classifier(), backend=rematc.backend("1GB", inner="eager"))
    seen = []
    for _ in range(3):
        out = run(batch())
        with torch.profiler.profile() as own:
            F.cross_entropy(out, labels()).backward()
        seen.append(len(own.events()))
    assert min(seen) > 0.9 * max(seen) > 20


def test_a_result_dropped_in_another_thread_ends_the_survey_in_its_own() -> None:
    backend = rematc.backend("1GB", inner="eager")
    run = torch.compile(Classifier(), backend=backend)
    box = [run(batch())]
    other = threading.Thread(target=box.clear)
    other.start()
    other.join()
    for _ in range(4):
        logits = run(batch())
        F.cross_entropy(logits, labels()).backward()
        assert not profiler_is_active()
    assert backend.outside[0].meanwhile_bytes > 2 * LOGITS


def test_two_losses_one_after_the_other_are_both_seen() -> None:
    """What runs between two backward passes is outside too."""
    backend = rematc.backend("1GB", inner="eager")
    first, second = (torch.compile(Classifier(), backend=backend) for _ in range(2))
    for _ in range(4):
        one, two = first(batch()), second(batch())
        F.cross_entropy(two, labels()).backward()
        F.cross_entropy(torch.cat([one, 2 * one, 3 * one]), labels().repeat(3)).backward()
    assert max(outside.meanwhile_bytes for outside in backend.outside) >= 6 * LOGITS


def test_a_step_whose_forward_pass_goes_back_in_the_next_is_surveyed_as_far_as_it_went() -> None:
    """A GAN: what is generated is judged twice, and the generator goes back the second time alone."""
    backend = rematc.backend("1GB", inner="eager")
    make = torch.compile(nn.Sequential(Block(), Block()), backend=backend)
    judge = torch.compile(Classifier(), backend=backend)
    for _ in range(8):
        fake = make(batch())
        F.cross_entropy(judge(fake.detach()), labels()).backward()
        F.cross_entropy(judge(fake), labels()).backward()
    assert max(outside.meanwhile_bytes for outside in backend.outside) >= LOGITS


# What a survey makes of what it is told


class Told:
    """A meter that is told what it measures."""

    waits, is_whole = False, True

    def __init__(self, rises: list[Span]) -> None:
        self.rises = rises
        self.opened = self.shut_ = 0

    def open(self) -> None:
        self.opened += 1

    def shut(self) -> None:
        self.shut_ += 1

    def close(self) -> None:
        assert self.opened == self.shut_ == len(self.rises)


def follow(rises: list[Span], gradients: list[list[Tensor]], returned: list[list[Tensor]]) -> list[Outside]:
    """The survey of a step of several calls, the last of which goes back first."""
    survey = Survey(Told(rises), lambda: None)
    for _ in gradients:
        survey.pause()
        survey.forward_ends()
    for call in reversed(range(len(gradients))):
        survey.backward_begins(call, gradients[call])
        if call:
            survey.backward_ends(returned[call])
    assert survey.is_over
    return survey.close()


def bytes_of(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.uint8)


def test_one_call_has_what_stays_and_what_was_there_meanwhile() -> None:
    assert follow([(100, 30)], [[bytes_of(10)]], [[]]) == [Outside(20, 80)]


def test_several_calls_see_what_those_before_them_left_outside() -> None:
    """5 of 7 bytes stay, then a loss of 40 leaves its gradient, and there is 1 more on the way back."""
    first, second = bytes_of(6), bytes_of(10)
    found = follow([(7, 5), (40, 10), (8, 7)], [[first], [second]], [[], []])
    assert found == [Outside(6, 7), Outside(5, 40)]


def test_a_gradient_that_another_graph_made_was_never_outside() -> None:
    passed = bytes_of(6)
    found = follow([(7, 5), (40, 10), (0, 0)], [[passed], [bytes_of(10)]], [[], [passed]])
    assert found == [Outside(5, 2), Outside(5, 40)]


def test_a_step_that_a_compiler_interrupts_tells_nothing_where_that_would_count() -> None:
    survey = survey_of([torch.ones(1)], lambda: None)
    assert survey is not None
    survey.forward_ends()
    survey.pause()
    give_way()
    survey.forward_ends()
    survey.backward_begins(1, [])
    survey.backward_ends([])
    survey.backward_begins(0, [])
    assert survey.is_over
    assert survey.close() == []
    assert not profiler_is_active()
    assert survey_of([torch.ones(1)], lambda: None) is None
    assert survey_of([torch.ones(1)], lambda: None) is not None


def test_on_cuda_it_is_what_the_allocator_counts() -> None:
    over = mock.Mock()
    with (
        mock.patch.object(torch.cuda, "memory_allocated", side_effect=[100, 130]),
        mock.patch.object(torch.cuda, "max_memory_allocated", return_value=190),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats") as reset,
    ):
        survey = Survey(CudaMeter(torch.device("cuda")), over)
        survey.forward_ends()
        survey.backward_begins(0, [bytes_of(10)])
    assert over.call_count == reset.call_count == 1  # it is over when its last graph is through
    assert survey.close() == [Outside(20, 70)]
