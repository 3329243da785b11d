"""Models made up at random: the same bits as without rematc, whatever is recomputed, within the budget."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import Tensor

import rematc
from rematc.baselines import recompute_all
from tests.programs import RANDOM, ROWS, WIDTH, Made, Program, programs

State = list[Tensor]
Compiled = tuple[Made, Callable[..., Any]]
# Saves all. With torch's other partitioner "aot_eager" recomputes from buffers that were overwritten since.
REFERENCE = "aot_eager_default_partitioner"
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
quick = settings(max_examples=8, suppress_health_check=CHECKS)
thorough = settings(max_examples=1000, suppress_health_check=CHECKS)

# Programs that once failed, or would if a pass were left out.
RETURNED_AND_SPLIT = Program((("turned", 0, 1), ("gelu", 0, 0), ("gelu", 0, 2), ("split", 1, 1)), (0, 2, 5))
READ_AND_OVERWRITTEN = Program((("average", 0, 0), ("tanh", 0, 0), ("average", 0, 0)), (0,))
OVERWRITTEN_THROUGH_A_VIEW = Program((("in place", 0, 1), ("rows", 0, 0)), (0,))
OVERWRITTEN_WHILE_IT_IS_READ = Program(
    (
        ("in place", 1, 2),
        ("in place", 2, 0),
        ("rows", 2, 0),
        ("product", 1, 1),
        ("gelu", 0, 0),
        ("split", 1, 0),
    ),
    (0,),
)
SUM = ("add", 0, 0)
THE_SAME_NOISE_TWICE = Program(
    (("noise", 0, 0), SUM, SUM, SUM, ("noise", 0, 4), ("variance", 5, 2), ("sorted", 1, 5), ("turned", 1, 3)),
    (1, 4, 10),
)
WITH_A_DEVICE_IN_ITS_CODE = Program((("spectrum", 0, 0), ("product", 0, 0)), (0,))

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code gen:UserWarning"),
]


def inputs() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(11)
    return tuple(torch.randn(ROWS, WIDTH, generator=make, requires_grad=True) for _ in range(2))  # type: ignore[return-value]


def loss_of(results: tuple[Tensor, ...]) -> Tensor:
    return sum(((n + 1) * out).sin().sum() for n, out in enumerate(results))  # type: ignore[return-value]


def two_steps(model: Made, run: Callable[..., Any], *, loss_inside: bool) -> State:
    """Results, gradients, buffers and the generator, of each of two steps."""
    x, y = inputs()
    torch.manual_seed(5)
    state: State = []
    for _ in range(2):
        out = run(x, y)
        loss = out if loss_inside else loss_of(out)
        if loss.requires_grad:
            loss.backward()
        state += [out] if loss_inside else list(out)
        for leaf in (x, y, *model.parameters()):
            state.append(torch.empty(0) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        state += [buffer.clone() for buffer in model.buffers()]
    return [*(t.detach() for t in state), torch.get_rng_state()]


def compiled(program: Program, backend: Any, *, loss_inside: bool) -> Compiled:
    torch._dynamo.reset()
    model = Made(program)
    if loss_inside:
        return model, torch.compile(lambda x, y: loss_of(model(x, y)), backend=backend)
    return model, torch.compile(model, backend=backend)


def assert_same_bits(program: Program, backend: Any, *, loss_inside: bool = False) -> Compiled:
    """What ``backend`` compiled is left to be measured."""
    theirs = two_steps(*compiled(program, REFERENCE, loss_inside=loss_inside), loss_inside=loss_inside)
    made = compiled(program, backend, loss_inside=loss_inside)
    ours = two_steps(*made, loss_inside=loss_inside)
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, n
        if not torch.equal(a, b):  # else they are equal but for NaN, in the same places
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"tensor {n} of the state")
    return made


def step_bytes(model: Made, run: Callable[..., Any]) -> int:
    """What a step takes beside what is resident, the loss in the graph."""
    x, y = inputs()

    def step() -> None:
        loss = run(x, y)
        if loss.requires_grad:
            loss.backward()
        for leaf in (x, y, *model.parameters()):
            leaf.grad = None

    return rematc.measure(step, warmup=2).peak_bytes


def recomputes_all(program: Program) -> None:
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("rematc.partition")
        patch.setattr(module, "solve", lambda problem, options: recompute_all(problem))
        assert_same_bits(program, rematc.backend(None, inner="eager", costs="roofline"))
        backend = rematc.backend(None, inner="eager", costs="roofline")
        taken = step_bytes(*compiled(program, backend, loss_inside=True))
        assert all(backend.resident_bytes + taken <= plan.peak_bytes for plan in backend.plans)


def backend_of(budget: int | None, inner: Any) -> rematc.Backend:
    return rematc.backend(budget, inner=inner, costs="roofline", time_limit_s=1.0)


def refusal_of(program: Program, inner: Any) -> rematc.BudgetError | None:
    """None: nothing here has a gradient."""
    _, run = compiled(program, backend_of(1, inner), loss_inside=True)
    try:
        run(*inputs())
    except rematc.BudgetError as e:
        return e
    return None


def assert_within(made: Compiled, refused: rematc.BudgetError) -> None:
    """What a step takes is within the smallest budget."""
    assert refused.resident_bytes + step_bytes(*made) <= refused.minimum_bytes


def keeps_its_smallest_budget(program: Program) -> None:
    if refused := refusal_of(program, "eager"):
        made = assert_same_bits(program, backend_of(refused.minimum_bytes, "eager"), loss_inside=True)
        assert_within(made, refused)


def is_right_under_inductor(program: Program) -> None:
    """As Inductor alone computes it; with random ops, which it numbers otherwise, whatever is recomputed."""
    is_random = any(op in RANDOM for op, _, _ in program.lines)
    refused = refusal_of(program, "inductor")
    backends: list[Any] = [] if is_random else ["inductor"]
    backends += [backend_of(None, "inductor")]
    backends += [backend_of(refused.minimum_bytes, "inductor")] if refused else []
    first, *others = (
        two_steps(*compiled(program, backend, loss_inside=True), loss_inside=True)[:-1]
        for backend in backends
    )
    for state in others:
        for ours, theirs in zip(state, first, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3, equal_nan=True)
    if refused:
        backend = backend_of(refused.minimum_bytes, "inductor")
        assert_within(compiled(program, backend, loss_inside=True), refused)


@quick
@example(RETURNED_AND_SPLIT)
@example(READ_AND_OVERWRITTEN)  # wrong where buffers are not kept as they were
@given(programs())
def test_whatever_can_be_is_recomputed_to_the_same_bits(program: Program) -> None:
    recomputes_all(program)


@quick
@example(THE_SAME_NOISE_TWICE)
@given(programs())
def test_the_smallest_budget_is_kept_and_the_bits_are_the_same(program: Program) -> None:
    keeps_its_smallest_budget(program)


@pytest.mark.slow
@thorough
@given(programs())
def test_a_thousand_times_the_bits_are_the_same(program: Program) -> None:
    recomputes_all(program)


@pytest.mark.slow
@thorough
@given(programs())
def test_a_thousand_times_the_smallest_budget_is_kept(program: Program) -> None:
    keeps_its_smallest_budget(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [OVERWRITTEN_THROUGH_A_VIEW, OVERWRITTEN_WHILE_IT_IS_READ, WITH_A_DEVICE_IN_ITS_CODE]
)
def test_what_was_wrong_under_inductor_is_right(program: Program) -> None:
    is_right_under_inductor(program)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=CHECKS)
@given(programs())
def test_under_inductor_the_budget_is_kept_and_gradients_are_equal_within_rounding(program: Program) -> None:
    is_right_under_inductor(program)
