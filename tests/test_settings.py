"""The settings of `rematc.backend` and the other ways in: by name, as a partitioner, on other torches."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

import rematc
from rematc import versions
from rematc.measure import measure
from tests.small import (
    Block,
    base_resident,
    batch,
    eager,
    gradients,
    net,
    resident,
    same_bits,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Settings


def test_backends_with_equal_settings_are_equal() -> None:
    assert eager("2MB") == eager("2MB")
    assert hash(eager("2MB")) == hash(eager("2MB"))
    assert eager("2MB") != eager("3MB")
    assert eager("2MB") != eager("2MB", reserve=1)
    assert eager("2MB") != "2MB"


@pytest.mark.parametrize(("budget", "nbytes"), [(None, None), ("1.9MiB", 1_992_294), (2_000_000, 2_000_000)])
def test_budgets_that_can_be_read(budget: str | int | None, nbytes: int | None) -> None:
    backend = eager(budget)
    torch.compile(Block(), backend=backend)(batch())
    (plan,) = backend.plans
    assert plan.budget_bytes == nbytes


@pytest.mark.parametrize("budget", ["much", "2 parrots", "", 0, -1, "0GB", "120%", True, 1.5])
def test_an_unreadable_budget_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(rematc.OptionError, match="budget"):
        rematc.backend(budget)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_percentage_on_the_cpu_is_refused_at_the_first_call(inner: Any) -> None:
    run = torch.compile(net(), backend=rematc.backend("80%", inner=inner))
    with pytest.raises(rematc.OptionError, match=r"on the CPU, which shares its memory.*give bytes"):
        run(batch())


def test_parameters_buffers_and_inputs_are_resident_to_the_byte() -> None:
    """The budget counts from there, and so do most tests: what is left out here would be left out in them."""
    model, backend = nn.Sequential(net(), nn.BatchNorm1d(4)), eager(None)
    torch.compile(model, backend=backend)(batch())
    there = [*model.parameters(), *model.buffers(), batch()]
    assert backend.resident_bytes == sum(t.nbytes for t in there)
    assert base_resident() == sum(t.nbytes for t in [*net().parameters(), batch()])


def test_reserve_is_resident() -> None:
    assert resident(reserve="1MB") == base_resident() + 1_000_000
    assert resident(reserve=4321) == base_resident() + 4321


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


FORMS = [(momentum, "instance"), (torch.optim.Adam, "instance"), (adamw, "instance"), (adamw, "function")]


@pytest.mark.parametrize(("make", "form"), FORMS)
def test_the_state_of_an_optimizer_is_kept_free_to_the_byte(make: Any, form: str) -> None:
    model = net()
    optimizer = make(model.parameters())
    kept = resident(optimizer=optimizer if form == "instance" else make) - base_resident()
    assert not optimizer.state  # it was not touched
    gradients(model, model)
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert kept == sum(t.nbytes for t in state) > 0


def raises(params: Any) -> Any:
    raise KeyError("lr")


@pytest.mark.parametrize("broken", [raises, lambda params: 3, lambda params: momentum([])])
def test_a_broken_optimizer_is_named(broken: Any) -> None:
    with pytest.raises(rematc.OptionError, match=r"optimizer=.*give reserve="):
        torch.compile(net(), backend=eager(optimizer=broken))(batch())
    with pytest.raises(rematc.OptionError, match="give an optimizer, or a function"):
        rematc.backend("2GB", optimizer=3)


# By name


def test_by_name_with_options() -> None:
    model = net()
    expected = gradients(model, model)
    run = torch.compile(model, backend="rematc", options={"budget": "2MB", "inner": "eager"})
    assert same_bits(gradients(model, run), expected)


def test_by_name_with_the_budget_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATC_BUDGET", "1000")
    with pytest.raises(rematc.BudgetError) as refused:
        torch.compile(net(), backend="rematc", options={"inner": "eager"})(batch())
    assert refused.value.budget_bytes == 1000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs a budget.*REMATC_BUDGET=20GB"),
        ({"budget": "2 parrots"}, "unknown unit 'parrots'"),
        ({"budget": "2MB", "speed": 3}, "'speed'.*settings are budget, inner, reserve, optimizer"),
    ],
)
def test_by_name_with_wrong_options(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMATC_BUDGET", raising=False)
    with pytest.raises(rematc.OptionError, match=says):
        torch.compile(net(), backend="rematc", options=options)(batch())


# Torch versions


def test_an_old_torch_is_refused() -> None:
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer, and this is torch 2\.4: upgrade"):
        versions.check_torch((2, 4))


def test_an_untested_torch_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rematc"):
        versions.check_torch((2, 99))
        versions.check_torch((2, 99))
    assert [r.getMessage()[:25] for r in caplog.records] == ["torch 2.99 is untested wi"]


# Inductor


def test_inductor() -> None:
    model, backend = net().eval(), rematc.backend("2MB")
    expected = gradients(model, model)
    torch.testing.assert_close(gradients(model, torch.compile(model, backend=backend)), expected)
    assert len(backend.plans) == 1


@functorch_config.patch(enable_autograd_cache=False)  # on a hit no partitioner runs
def test_as_a_partitioner_of_inductor() -> None:
    model, ours = net().eval(), rematc.partitioner("2MB")
    expected = gradients(model, model)
    run = torch.compile(model, backend="inductor", options={"custom_partitioner_fn": ours})
    torch.testing.assert_close(gradients(model, run), expected)
    assert len(ours.plans) == 1
    assert ours.plans[0].peak_bytes <= 2_000_000


@functorch_config.patch(enable_autograd_cache=False)
def test_what_a_partitioner_predicts_is_what_inductor_s_own_code_needs() -> None:
    model, ours, x = net(), rematc.partitioner(None), batch()
    options = {"custom_partitioner_fn": ours}
    run = torch.compile(lambda x: model(x).square().mean(), backend="inductor", options=options)

    def step() -> None:
        run(x).backward()
        model.zero_grad()

    step()
    measured = measure(step, warmup=1).peak_bytes + base_resident()
    assert measured <= ours.plans[0].peak_bytes <= 1.03 * measured


def test_a_partitioner_can_be_pickled_and_its_plans_are_no_setting() -> None:
    """Inductor's cache key is made of this pickle: equal for equal settings, whatever was planned."""
    ours = rematc.partitioner("2MB")
    before = pickle.dumps(ours)
    ours.plans.append(rematc.Plan((), ()))
    assert pickle.dumps(ours) == before == pickle.dumps(rematc.partitioner("2MB"))
    assert before != pickle.dumps(rematc.partitioner("3MB"))
    assert pickle.loads(before).uuid() == ours.uuid()
