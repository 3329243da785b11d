"""What an optimizer's step takes beside parameters, gradients and state: found, and said where it is much."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc import compat
from rematc.optimizer import Needs, optimizer_needs
from rematc.options import Options
from rematc.resident import training
from rematc.trace import plan_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own
ROWS, WIDTH = 8, 64
SIZES = 3, 5, 2  # rows of parameters: the largest is none of the ends
OPTIM = torch.optim
EACH: dict[str, Any] = {
    "Adam": OPTIM.Adam,
    "Adam, with decay": partial(OPTIM.Adam, weight_decay=0.1),
    "Adam, all at once": partial(OPTIM.Adam, foreach=True),
    "AdamW": OPTIM.AdamW,
    "AdamW, fused": partial(OPTIM.AdamW, fused=True),
    "Adamax": OPTIM.Adamax,
    "Adadelta": OPTIM.Adadelta,
    "Rprop": OPTIM.Rprop,
    "Adagrad, all at once": partial(OPTIM.Adagrad, foreach=True),
    "Adafactor": OPTIM.Adafactor,
    "NAdam": OPTIM.NAdam,
    "RAdam": OPTIM.RAdam,
    "RMSprop": OPTIM.RMSprop,
    "SGD": OPTIM.SGD,
    "SGD, Nesterov": partial(OPTIM.SGD, momentum=0.9, nesterov=True),
}


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(n, WIDTH, device=device)) for n in SIZES]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


@pytest.mark.parametrize("name", EACH)
def test_a_step_makes_as_much_as_is_measured(name: str) -> None:
    optimizer = EACH[name](parameters())
    needs = optimizer_needs(optimizer, [])
    measured = rematc.measure(optimizer.step, warmup=10).peak_bytes  # RAdam begins otherwise
    assert needs.step_bytes <= measured <= needs.step_bytes + 64  # numbers that stand beside
    assert (needs.step_bytes == 0) is (name in ("AdamW, fused", "SGD"))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_on_a_gpu_torch_chooses_to_step_all_parameters_at_once(device: str) -> None:
    """Unless it is told how; a learning rate that is a tensor can't be, nor Adafactor by itself."""

    def made(make: Any, rate: Any = 0.1, **how: Any) -> int:
        with compat.fake_tensors():
            optimizer = make(parameters(device), **how)
        optimizer.param_groups[0]["lr"] = rate
        return optimizer_needs(optimizer, [], for_card=True).step_bytes

    unit = 512 if device == "cuda" else 1
    every = sum(-(-n * WIDTH * 4 // unit) * unit for n in SIZES)
    assert made(OPTIM.AdamW) == made(OPTIM.AdamW, foreach=True) == every
    one_by_one = made(OPTIM.AdamW, foreach=False)
    assert one_by_one == made(OPTIM.AdamW, fused=False) > made(OPTIM.AdamW, fused=True) == 0
    assert one_by_one + 4 == made(OPTIM.AdamW, torch.tensor(0.1))  # a number beside
    assert made(OPTIM.Adafactor) == made(OPTIM.Adafactor, foreach=False)


def test_of_what_is_frozen_nothing_is_kept() -> None:
    """As in a fine-tuning that hands all of a model's parameters to the optimizer."""
    every, trained = parameters(), parameters()[:1]
    for p in every[1:]:
        p.requires_grad_(False).grad = None
    assert optimizer_needs(OPTIM.AdamW(every), []) == optimizer_needs(OPTIM.AdamW(trained), [])
    assert optimizer_needs(OPTIM.AdamW, every) == optimizer_needs(OPTIM.AdamW, trained)


def test_what_is_frozen_after_some_steps_keeps_its_state() -> None:
    optimizer = OPTIM.AdamW(parameters())
    optimizer.step()
    before = optimizer_needs(optimizer, []).state_bytes
    for p in optimizer.param_groups[0]["params"][1:]:
        p.requires_grad_(False).grad = None
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert optimizer_needs(optimizer, []).state_bytes == before == state


def test_of_a_sharded_parameter_what_is_on_this_rank_counts() -> None:
    (whole,) = parameters()[:1]
    whole.to_local = lambda: whole[:1]  # type: ignore[method-assign]  # as a DTensor has it
    needs = optimizer_needs(OPTIM.AdamW([whole]), [])
    assert needs == optimizer_needs(OPTIM.AdamW([nn.Parameter(torch.ones(1, WIDTH))]), [])
    assert training(Options(None, optimizer=OPTIM.AdamW), [whole]).stepped_bytes == 2 * WIDTH * 4


class OfParts(OPTIM.SGD):
    """Uses a part of what it makes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            part = p.detach().exp()[:1]
            p.detach().add_(part + 1)


def test_a_part_of_what_is_made_keeps_all_of_it() -> None:
    largest = max(SIZES) * WIDTH * 4
    assert optimizer_needs(OfParts(parameters()[1:2], lr=0.1), []).step_bytes == largest + WIDTH * 4


class StepsOnce(OPTIM.SGD):
    """Fails in its second step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if self.state[p]:
                raise RuntimeError("no more")
            self.state[p]["there"] = torch.ones_like(p)


def test_where_it_can_t_be_found_out_it_is_nothing() -> None:
    assert optimizer_needs(StepsOnce(parameters()), []) == Needs(sum(SIZES) * WIDTH * 4)
    assert optimizer_needs(None, []) == Needs()


class Block(nn.Linear):
    """Not torch's own: by itself that is not compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def wide() -> nn.Sequential:
    """More parameters than activations."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, WIDTH) for _ in range(4)))


def of_the_step(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "the optimizer's step needs" in r.getMessage()]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("how", "reserve", "more", "is_said"), [
    ({}, 0, 0, True),
    ({}, 0, 4 * WIDTH * WIDTH * 3, False),
    ({}, 4 * WIDTH * WIDTH * 3, 4 * WIDTH * WIDTH * 3, False),
    ({"fused": True}, 0, 0, False),
    ({"foreach": True}, 0, 0, True),
])  # fmt: skip
def test_a_step_above_the_budget_is_said_and_no_other(
    how: dict[str, Any], reserve: int, more: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it is above is measured, with all that is there."""
    model, x = wide(), torch.ones(ROWS, WIDTH)
    optimizer = OPTIM.AdamW(model.parameters(), **how)
    there = sum(t.nbytes for t in (*model.parameters(), x))
    budget = 4 * there + 3 * x.nbytes + more  # parameters, gradients, and a state of two
    backend = rematc.backend(budget, inner="eager", optimizer=optimizer, reserve=reserve)
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        optimizer.zero_grad()
        compiled(x).sum().backward()
        optimizer.step()

    with caplog.at_level(logging.WARNING, "rematc"):
        step()
        step()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    gradients = sum(p.nbytes for p in model.parameters())  # of the step before
    peak = there + state + gradients + rematc.measure(step, warmup=1).peak_bytes
    assert (peak > budget) is is_said
    assert len(of_the_step(caplog)) == is_said
    assert any("the optimizer's step" in note for note in backend.plans[-1].notes) is is_said


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_said", [True, False])
def test_that_of_several_graphs_is_told_of_all(is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What each has by itself is not too much."""
    model, x = wide(), torch.ones(ROWS, WIDTH)
    there = sum(t.nbytes for t in (*model.parameters(), x))
    budget = 4 * there + 8 * x.nbytes + (0 if is_said else 4 * WIDTH * WIDTH * 4)
    for layer in model:
        layer.compile(backend=rematc.backend(budget, inner="eager", optimizer=OPTIM.AdamW))
    with caplog.at_level(logging.WARNING, "rematc"):
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()
    assert len(of_the_step(caplog)) == is_said


@pytest.mark.usefixtures("fresh_dynamo")
def test_batches_of_several_sizes_have_it_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = wide()
    backend = rematc.backend(4 * WIDTH * WIDTH * 17, inner="eager", optimizer=OPTIM.AdamW)
    with caplog.at_level(logging.WARNING, "rematc"):
        for rows in (2, 3, 4):
            torch.compile(model, backend=backend, dynamic=False)(torch.ones(rows, WIDTH)).sum().backward()
            model.zero_grad()
    assert len(backend.plans) == 3 and len(of_the_step(caplog)) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_gradients_that_are_added_to_are_not_there_when_it_steps(caplog: pytest.LogCaptureFixture) -> None:
    """While the backward pass runs there are two of each, and then one."""
    model, x = wide(), torch.ones(ROWS, WIDTH)
    there = sum(p.nbytes for p in model.parameters())
    budget = 5 * there + 8 * x.nbytes
    backend = rematc.backend(budget, inner="eager", optimizer=OPTIM.AdamW, accumulate=True)
    with caplog.at_level(logging.WARNING, "rematc"):
        torch.compile(model, backend=backend)(x).sum().backward()
    assert not of_the_step(caplog)


def test_explain_has_it_among_the_notes() -> None:
    model, x = wide(), torch.ones(ROWS, WIDTH)
    there = sum(p.nbytes for p in model.parameters())
    for budget, is_said in ((4 * there + 8 * x.nbytes, True), (6 * there, False)):
        options = Options(budget, "eager", optimizer=OPTIM.AdamW)
        _, plan = plan_model(model, x, torch.sum, options)
        assert any("fused=True" in note for note in plan.notes) is is_said
