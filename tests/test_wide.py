"""Many models as people have them, at two budgets each: what `test_models` asserts of a few."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import rematc
from rematc.measure import measure
from rematc.options import Inner
from tests.test_models import (
    assert_within_rounding,
    case_for,
    clear,
    compiled,
    holds_op_by_op,
    holds_under_inductor,
    peak_of,
    same_bits,
    state_after,
)
from tests.zoo_wide import SEVERAL, WIDE, wav2vec2

SHARES = (0.0, 0.5)  # of the way from the floor x 1.02 to saving everything
QUICK = (("qwen3", 0.5),)
EACH = [
    pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
    for cell in itertools.product(WIDE, SHARES)
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Torchinductor does not support code generation for complex:UserWarning"
    ),
]


@pytest.mark.parametrize(("name", "share"), EACH)
def test_op_by_op_the_budget_holds_and_the_bits_are_the_same(name: str, share: float) -> None:
    holds_op_by_op(name, share)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", WIDE)
def test_under_inductor_the_budget_holds_and_gradients_are_equal_within_rounding(
    name: str, share: float
) -> None:
    holds_under_inductor(name, share)


def needed_by_six_steps(name: str, inner: Inner, budget: int) -> int:
    """The predicted peak of a model of several graphs, once it was asserted."""
    case = case_for(name, inner)
    expected = state_after(case, lambda **inputs: case.loss(case.model(**inputs)))
    backend = rematc.backend(budget, inner=inner, measure_s=1.0)
    case = case_for(name, inner)
    run = compiled(case, backend)
    for _ in range(6):
        got = state_after(case, run)
        clear(case)
    if inner == "eager":
        assert same_bits(got, expected)
    else:
        assert_within_rounding(got, expected)
    assert len(backend.plans) > 1
    predicted = max(plan.peak_bytes for plan in backend.plans)
    assert backend.resident_bytes + peak_of(case, run) <= predicted <= budget
    return predicted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", SEVERAL)
def test_models_of_several_graphs_share_a_budget(name: str, inner: Inner) -> None:
    """The bits are eager's; op by op, no graph is another for what lies between them."""
    free = needed_by_six_steps(name, inner, 10**9)
    needed_by_six_steps(name, inner, int(0.9 * free))


def trained_at_random(backend: Any) -> tuple[rematc.Backend, list[Tensor], int]:
    """What some steps leave, whose layers are drawn; and the most that more of them take."""
    torch._dynamo.reset()
    case = wav2vec2()
    run = torch.compile(case.model.train(), backend=backend)

    def step(seed: int) -> list[Tensor]:
        clear(case)
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        case.loss(run(**case.inputs)).backward()
        return [p.grad for p in case.model.parameters() if p.grad is not None]

    gradients = [grad.clone() for seed in range(6) for grad in step(seed)]
    return backend, gradients, max(measure(partial(step, seed)).peak_bytes for seed in range(6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # transformers' own
def test_a_model_whose_layers_are_left_out_at_random_keeps_its_budget() -> None:
    """Each draw is a kind of step of its own. What runs eagerly before the first graph is not predicted."""
    free, _, _ = trained_at_random(rematc.backend("1GB", inner="eager"))
    budget = int(0.85 * max(plan.peak_bytes for plan in free.plans))
    backend, ours, peak_bytes = trained_at_random(rematc.backend(budget, inner="eager"))
    assert backend.resident_bytes + peak_bytes <= budget
    assert sum(plan.cost_ns for plan in backend.plans) > 0
    _, theirs, _ = trained_at_random("aot_eager")
    assert same_bits(ours, theirs)


def test_there_are_more_than_forty() -> None:
    assert len(WIDE) > 40
