"""What lies outside of the compiled graphs: found in the first steps, and then planned for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.measure import measure
from tests.blocks import Block, Model, batch, gradients, made, step_of
from tests.losses import CLASSES, LOGITS, ROWS, Classifier, gradients_of, labels, training

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


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
    low = 1
    for known in (0, 1):  # steps with the budget before: what is outside is not known in the first
        torch._dynamo.reset()
        _, step = training(rematc.backend(low, inner=inner))
        for _ in range(known):
            step()
        with pytest.raises(rematc.BudgetError) as refused:
            step()
        low = refused.value.minimum_bytes
    torch._dynamo.reset()
    return low, free.plans[0].peak_bytes


@pytest.mark.parametrize(
    ("share", "inner"),
    [(0.0, "eager"), (0.5, "eager"), (1.0, "eager"), pytest.param(0.2, "inductor", marks=pytest.mark.slow)],
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


@pytest.mark.parametrize("widths", [(64, 64), (64, 96)], ids=["of the student's shape", "of another"])
def test_a_teacher_whose_result_is_detached_hides_nothing(widths: tuple[int, int]) -> None:
    """Its forward passes end at once, and with them whatever follows them."""
    torch.manual_seed(0)
    backend = rematc.backend("1GB", inner="eager")
    student, teacher = (
        nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 1000)) for width in widths
    )
    learns, knows = (torch.compile(model, backend=backend) for model in (student, teacher))
    x = torch.randn(256, 16)

    def step() -> None:
        target = knows(x).detach()
        logits = learns(x)
        (logits - target).square().mean().backward()
        student.zero_grad()

    for _ in range(4):
        step()
    there = sum(t.nbytes for t in (*student.parameters(), x))
    measured = there + measure(step).peak_bytes
    assert measured <= max(plan.peak_bytes for plan in backend.plans) <= 1.01 * measured


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_graph_whose_gradient_is_known_without_a_backward_pass_has_a_loss_outside_too(inner: Any) -> None:
    """That of a sign is zero, and is made with it."""

    def signs(x: Tensor) -> Tensor:
        return (2 * x).sgn().sin()

    x = torch.randn(1000, requires_grad=True)
    backend = rematc.backend(1_000_000, inner=inner)
    run = torch.compile(signs, backend=backend)
    for _ in range(4):
        x.grad = None
        run(x).exp().sum().backward()
        assert x.grad is not None
        assert not x.grad.any()
    (plan,) = backend.plans
    assert plan.peak_bytes >= 3 * x.nbytes  # its input, its result, and the loss's gradient
