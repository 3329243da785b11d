"""The promises on real models: the budget bounds the measured peak, and the gradients are the same.

A cell is a model and a budget. Budgets are counted from the floor to no limit; what is resident
(parameters, buffers, the batch) is in the budget and in the prediction, but not in the measurement,
which counts what the step allocates.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import rematc
from rematc.baselines import STRATEGIES
from rematc.measure import measure
from rematc.options import Options, SolveOptions
from rematc.trace import plan_model
from tests.zoo import ZOO, Case
from tests.zoo_more import ALL
from tests.zoo_wide import SEVERAL, WIDE

SHARES = (0.0, 0.15, 0.3, 0.5, 0.85, None)  # of the way from the floor x 1.02 to saving everything
QUICKLY = (("mlp", 0.0), ("mlp", 0.5), ("unet", 0.5), ("unet", None), ("vit", None))  # others take longer


OP_BY_OP = [
    pytest.param(
        name,
        share,
        id=f"{name}-{'no limit' if share is None else f'{share:.0%}'}",
        marks=() if (name, share) in QUICKLY else pytest.mark.slow,
    )
    for name in ZOO
    for share in SHARES
]
SEED = 3
EVERY = {**ALL, **WIDE, **SEVERAL}
State = list[Tensor | None]


def eager(case: Case) -> Callable[..., Tensor]:
    """The model with its loss, as one function."""

    def loss(**inputs: Tensor) -> Tensor:
        return case.loss(case.model(**inputs))

    return loss


def compiled(case: Case, backend: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(eager(case), backend=backend)


def step(case: Case, run: Callable[..., Tensor]) -> Tensor:
    torch.manual_seed(SEED)
    loss = run(**case.inputs)
    loss.backward()
    return loss.detach()


def state_after(case: Case, run: Callable[..., Tensor]) -> State:
    """Loss, every gradient, every buffer (BatchNorm's statistics) and the generator after one step."""
    loss = step(case, run)
    grads = [None if p.grad is None else p.grad.clone() for p in case.model.parameters()]
    return [loss, *grads, *(b.clone() for b in case.model.buffers()), torch.get_rng_state()]


def peak_of(case: Case, run: Callable[..., Tensor]) -> int:
    """Measured bytes that a step needs above what is there before it, gradients None."""

    def one() -> None:
        step(case, run)
        clear(case)

    clear(case)
    return measure(one, warmup=1).peak_bytes


def clear(case: Case) -> None:
    for p in case.model.parameters():
        p.grad = None


@functools.cache
def reference(name: str) -> State:
    case = EVERY[name]()
    return state_after(case, compiled(case, "aot_eager"))


@functools.cache
def limits(name: str, inner: Any = "eager") -> tuple[int, int, int]:
    """Resident bytes, the smallest budget, and the peak of the cheapest plan."""
    refused = refusal(name, inner)
    case, solve = case_for(name, inner), SolveOptions(time_limit_s=2)
    _, plan = plan_model(case.model, case.inputs, case.loss, Options(None, inner, solve=solve, measure_s=1.0))
    return refused.resident_bytes, refused.minimum_bytes, plan.peak_bytes


def case_for(name: str, inner: Any) -> Case:
    """Inductor draws other random numbers than eager does, so the two compare only without any."""
    case = EVERY[name]()
    if inner == "inductor":
        silence_dropout(case)
    return case


@functools.cache
def refusal(name: str, inner: Any = "eager") -> rematc.BudgetError:
    case, solve = case_for(name, inner), SolveOptions(time_limit_s=2)
    torch._dynamo.reset()
    with pytest.raises(rematc.BudgetError) as refused:
        plan_model(case.model, case.inputs, case.loss, Options(1, inner, solve=solve, measure_s=1.0))
    return refused.value


def budget_for(name: str, share: float | None, inner: Any = "eager") -> int | None:
    if share is None:
        return None
    resident, floor, top = limits(name, inner)
    low = resident + int((floor - resident) * 1.02)
    return int(low + share * max(0, top - low))


def same_bits(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


@pytest.mark.parametrize(("name", "share"), OP_BY_OP)
def test_op_by_op_the_budget_bounds_the_peak_and_the_gradients_are_the_same(
    name: str, share: float | None
) -> None:
    holds_op_by_op(name, share)


def holds_op_by_op(name: str, share: float | None) -> None:
    budget, expected = budget_for(name, share), reference(name)
    case = EVERY[name]()
    backend = rematc.backend(budget, inner="eager", time_limit_s=2, measure_s=1.0)
    run = compiled(case, backend)
    assert same_bits(state_after(case, run), expected)
    measured = peak_of(case, run)
    (plan,), (problem,) = backend.plans, backend.problems
    if budget is not None:
        assert problem.resident_bytes + measured <= budget
        assert plan.peak_bytes <= budget
    predicted = plan.peak_bytes - problem.resident_bytes
    assert predicted == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mlp" else pytest.mark.slow) for n in ZOO])
def test_the_smallest_budget_is_accepted(name: str) -> None:
    refused, expected = refusal(name), reference(name)
    case, floor = ALL[name](), refused.minimum_bytes
    backend = rematc.backend(floor, inner="eager", time_limit_s=1)
    run = compiled(case, backend)
    assert same_bits(state_after(case, run), expected)
    assert refused.resident_bytes + peak_of(case, run) <= floor


@pytest.mark.parametrize("strategy", ["greedy", "sqrt_l", "min_cut", "recompute_all"])
def test_the_plan_of_any_strategy_needs_what_the_simulation_says(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baselines save values that a later recomputation makes anew: those must be let go of too."""
    (resident, floor, top), expected = limits("unet"), reference("unet")
    solver = STRATEGIES[strategy]
    case = ZOO["unet"]()
    backend = rematc.backend(None, inner="eager")
    limited = (floor + top) // 2
    module = sys.modules["rematc.partition"]
    monkeypatch.setattr(module, "solve", lambda p, o: solver(p.with_budget(limited), o))
    run = compiled(case, backend)
    assert same_bits(state_after(case, run), expected)
    (plan,) = backend.plans
    assert plan.peak_bytes - resident == pytest.approx(peak_of(case, run), rel=0.005)


QUICK = (("bert", None),)  # at the smallest budget: the convolutions of test_inductor
CELLS = [(name, share) for name in ALL for share in (0.0, 0.3, None)]
INDUCTOR = [
    pytest.param(*cell, id="-".join(map(str, cell)), marks=() if cell in QUICK else pytest.mark.slow)
    for cell in CELLS
]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")  # Mamba's, in transformers
@pytest.mark.parametrize(("name", "share"), INDUCTOR)
def test_under_inductor_the_budget_bounds_the_peak_and_gradients_are_equal_within_rounding(
    name: str, share: float | None
) -> None:
    holds_under_inductor(name, share)


LESS = [
    ("mlp", 0.85),
    *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("qwen3", 0.85), ("llama", 2 / 3))),
]


@pytest.mark.parametrize(("name", "share"), LESS)
def test_under_inductor_a_model_keeps_to_less_than_it_takes(name: str, share: float) -> None:
    """Above what is resident; to look for the smallest budget first takes a minute."""
    case = case_for(name, "inductor")
    problem, plan = plan_model(case.model, case.inputs, case.loss, Options(None, "inductor", measure_s=1.0))
    resident = problem.resident_bytes
    keeps_under_inductor(name, resident + int((plan.peak_bytes - resident) * share))


OFF_BY_ITSELF = ("falcon", "resnet")  # with Inductor alone: by 1.3 %, 0.07 % of the largest gradient


def holds_under_inductor(name: str, share: float | None) -> None:
    keeps_under_inductor(name, budget_for(name, share, "inductor"))


def keeps_under_inductor(name: str, budget: int | None) -> None:
    case = case_for(name, "inductor")
    expected = state_after(case, compiled(case, "aot_eager"))
    off = _furthest(expected, _of_inductor_alone(name)) if name in OFF_BY_ITSELF else 0.0
    case = case_for(name, "inductor")
    backend = rematc.backend(budget, inner="inductor", time_limit_s=2, measure_s=1.0)
    run = compiled(case, backend)
    assert_within_rounding(state_after(case, run), expected, off)
    resident = backend.problems[-1].resident_bytes
    measured, predicted = peak_of(case, run), backend.plans[-1].peak_bytes - resident
    assert measured <= predicted <= 1.03 * measured
    if budget is None:
        assert measured <= peak_of(case, eager(case))  # no limit is no reason to take more than eager PyTorch
    else:
        assert resident + measured <= budget


def assert_within_rounding(got: State, expected: State, off: float = 0.0) -> None:
    """Equal but for what compiled code rounds otherwise, and ``off``."""
    largest = max(float(e.abs().max()) for e in expected[1:-1] if e is not None and e.is_floating_point())
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            # Inductor without rematc is itself off by 7e-5 of it on the U-Net, judged by fp64.
            tolerance = (2e-3, off + 1e-4 * largest) if ours.is_floating_point() else (0.0, 0.0)
            torch.testing.assert_close(ours, theirs, rtol=tolerance[0], atol=tolerance[1])


def silence_dropout(case: Case) -> None:
    for module in case.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@pytest.mark.slow
def test_dropout_is_recomputed_with_the_same_random_numbers_under_inductor() -> None:
    """Two plans of one model draw the same numbers, so their gradients agree, whatever is recomputed."""
    free, grads = rematc.backend(None), []
    for _ in range(2):
        tight = rematc.backend(free.plans[0].peak_bytes * 4 // 5) if free.plans else free
        case = ZOO["gpt2"]()
        grads.append(state_after(case, compiled(case, tight))[1:-1])
    assert tight.plans[0].cost_ns > 0
    for a, b in zip(*grads, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


def _of_inductor_alone(name: str) -> State:
    case = case_for(name, "inductor")
    return state_after(case, compiled(case, "inductor"))


def _furthest(some: State, others: State) -> float:
    pairs = zip(some, others, strict=True)
    return max(
        float((a - b).abs().max())
        for a, b in pairs
        if a is not None and b is not None and a.is_floating_point()
    )
