"""`rematc.backend` as a user meets it: budgets below the floor, and gradients in all kinds of use."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematc
from rematc.baselines import save_all
from rematc.measure import measure
from rematc.solve import solver
from tests.small import (
    SEED,
    Block,
    batch,
    eager,
    gradients,
    net,
    refusal,
    same_bits,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# A budget below the floor


@pytest.mark.parametrize("suppress", [False, True])
def test_a_budget_that_cannot_be_met_is_refused_at_every_call(suppress: bool) -> None:
    """With suppress_errors Dynamo drops a backend's own errors and runs the model with no budget."""
    with torch._dynamo.config.patch(suppress_errors=suppress):
        run = torch.compile(net(), backend=eager(1000))
        for _ in range(2):
            with pytest.raises(rematc.BudgetError, match=r"what to try: budget=\d+") as refused:
                run(batch())
    error = refused.value
    assert (error.budget_bytes, len(error.largest)) == (1000, 3)
    assert [size for _, size in error.largest] == sorted((size for _, size in error.largest), reverse=True)
    assert f"in the way: {error.step}," in str(error)
    assert f"budget={error.minimum_bytes}" in str(error)
    assert all(name in str(error) for name, _ in error.largest)


def test_checkpoints_in_the_model_are_no_longer_needed_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    plain = eager("1MB")
    expected = gradients(model, torch.compile(model, backend=plain))
    assert "torch.utils.checkpoint" not in caplog.text
    torch._dynamo.reset()
    backend = eager("1MB")
    run = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend=backend)
    assert same_bits(gradients(model, run), expected)
    assert "regions under torch.utils.checkpoint" in caplog.text
    assert backend.plans[0].cost_ns == plain.plans[0].cost_ns == 0


def test_a_plan_that_costs_more_than_a_forward_pass_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    deep = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(12)))
    x = torch.randn(256, 32)
    with pytest.raises(rematc.BudgetError) as refused:
        torch.compile(deep, backend=eager(1000))(x)
    least = refused.value.minimum_bytes
    torch.compile(deep, backend=eager(2 * least))(x)
    assert "forward pass" not in caplog.text
    torch._dynamo.reset()
    torch.compile(deep, backend=eager(least))(x)
    assert "times as long as the forward pass" in caplog.text


def test_a_plan_that_is_only_the_greedy_one_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["rematc.partition"]
    monkeypatch.setattr(
        module, "solve", lambda problem, _: solver._fallen_back(save_all(problem.with_budget(None)))
    )
    torch.compile(net(), backend=eager("1GB"))(batch())
    assert "found no cheaper plan within the time limit" in caplog.text


def test_a_refusal_that_is_being_handled_is_not_taken_for_the_cause_of_another_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who tries again with what was named does so in the handler."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of somebody else")

    try:
        torch.compile(net(), backend=eager(1000))(batch())
    except rematc.BudgetError as e:
        monkeypatch.setattr(sys.modules["rematc.partition"], "partition", broken)
        with pytest.raises(Exception, match="of somebody else"):
            torch.compile(net(), backend=eager(e.minimum_bytes))(batch())
    else:
        pytest.fail("was not refused")


def test_the_smallest_budget_named_is_kept() -> None:
    error = refusal()
    model = net()
    backend = eager(error.minimum_bytes)
    run = torch.compile(model, backend=backend)
    gradients(model, run)
    model.zero_grad()

    def step() -> None:
        loss = run(batch_once).square().mean()
        loss.backward()

    batch_once = batch()
    peak = measure(step).peak_bytes + backend.resident_bytes
    assert peak <= error.minimum_bytes
    assert backend.plans[0].peak_bytes <= error.minimum_bytes


def test_one_byte_below_the_smallest_budget_is_refused() -> None:
    error = refusal()
    assert refusal(error.minimum_bytes - 1).minimum_bytes == error.minimum_bytes


# Gradients


@pytest.mark.parametrize("share", [0.0, 0.5, None])
def test_gradients_are_bit_for_bit_those_of_aot_eager(share: float | None) -> None:
    model, backend = net(), eager()
    expected = gradients(model, torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()
    if share is not None:
        torch.compile(net(), backend=backend)(batch())
        low, high = refusal().minimum_bytes, backend.plans[0].peak_bytes
        backend = eager(int(low + share * (high - low)))
    assert same_bits(gradients(model, torch.compile(model, backend=backend)), expected)
    assert bool(backend.plans[0].cost_ns) is (share is not None)


def test_module_compile() -> None:
    model, backend = net(), eager("2MB")
    expected = gradients(model, model)
    model.compile(backend=backend)
    assert same_bits(gradients(model, model), expected)
    assert len(backend.plans) == len(backend.problems) == 1
    assert set(model.state_dict()) == set(net().state_dict())


def test_equal_settings_plan_equally() -> None:
    plans = []
    for backend in (eager(300_000), eager(300_000)):
        torch._dynamo.reset()
        torch.compile(net(), backend=backend)(batch())
        plans.append((backend.plans[0].saved, backend.plans[0].backward, backend.plans[0].peak_bytes))
    assert plans[0] == plans[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_layers_compiled_one_by_one() -> None:
    model, backend = net(), eager("2MB")
    expected = gradients(model, model)
    for layer in (model.first, model.second):
        layer.compile(backend=backend)
    assert same_bits(gradients(model, model), expected)
    assert 1 <= len(backend.plans) <= 2


def test_a_layer_called_twice_adds_up_its_gradients() -> None:
    model, block = net(), Block()

    def twice(x: Tensor) -> Tensor:
        return model(block(block(x)))

    both = nn.ModuleList([model, block])
    expected = gradients(both, torch.compile(twice, backend="aot_eager"))
    torch._dynamo.reset()
    assert same_bits(gradients(both, torch.compile(twice, backend=eager("2MB"))), expected)


def test_a_model_called_twice_before_backward() -> None:
    model, backend = net().eval(), eager("2MB")
    run = torch.compile(model, backend=backend)

    def two(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: run(x) + run(x * 2)

    torch.testing.assert_close(gradients(model, two(run)), gradients(model, two(model)))
    assert len(backend.plans) == 1


def test_two_backward_passes_add_up() -> None:
    model = net()
    run = torch.compile(model, backend=eager("2MB"))
    once = gradients(model, run)
    torch.manual_seed(SEED)
    run(batch()).square().mean().backward()
    assert same_bits([p.grad for p in model.parameters() if p.grad is not None], [g * 2 for g in once])


def test_an_output_that_is_no_scalar() -> None:
    model, given = net().eval(), torch.linspace(-1, 1, 1024).view(256, 4)
    grads = []
    for run in (torch.compile(model, backend=eager("2MB")), torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        run(batch()).backward(given)
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert same_bits(*grads)


# Without gradients


def test_without_gradients_the_model_runs_and_nothing_is_planned() -> None:
    model, backend = net().eval(), eager(1000)
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        assert torch.equal(run(batch()), model(batch()))
    for p in model.parameters():
        p.requires_grad_(False)
    assert torch.equal(run(batch()), model(batch()))
    assert backend.plans == []


def test_results_that_have_no_gradient() -> None:
    model, backend = net().eval(), eager(1000)

    def choose(x: Tensor) -> tuple[Tensor, int]:
        return model(x).argmax(1), 3

    run = torch.compile(choose, backend=backend)
    with torch.no_grad():
        assert torch.equal(run(batch())[0], choose(batch())[0])
    assert torch.equal(run(batch())[0], choose(batch())[0])
    assert backend.plans == []


# Where no budget would be kept


def test_a_budget_for_which_nothing_was_compiled_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    backend, other = rematc.backend("3MB", inner="eager"), rematc.backend("4MB", inner="eager")
    for same in (other, rematc.backend("4MB", inner="eager")):
        torch.compile(net(), backend=same)(batch()).sum().backward()
    del backend, other, same
    torch._dynamo.reset()
    gc.collect()
    said = [message for message in caplog.messages if "no budget was kept" in message]
    assert len(said) == 1 and "'3MB'" in said[0]


def test_a_backend_is_copied_as_frameworks_do_and_pickled() -> None:
    backend = eager("2GB", reserve=1)
    model = net()
    gradients(model, torch.compile(model, backend=copy.deepcopy({"backend": backend})["backend"]))
    assert len(backend.plans) == 1
    other = pickle.loads(pickle.dumps(backend))
    assert other == backend and not other.plans


def test_a_plan_that_recomputes_has_its_proof() -> None:
    """That which the solver gives for its problem, not lost on the way."""
    model, backend = net(), eager()
    gradients(model, torch.compile(model, backend=backend))
    top = backend.plans[0].peak_bytes
    torch._dynamo.reset()
    backend = eager(int(0.8 * top))
    gradients(model, torch.compile(model, backend=backend))
    (plan,), (problem,) = backend.plans, backend.problems
    assert 0 < plan.bound_ns <= plan.cost_ns
    assert plan.bound_ns == rematc.solve(problem).bound_ns
