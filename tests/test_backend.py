"""`rematc.backend` as a user meets it: settings, errors, gradients, and what it says it planned."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

import rematc
from rematc import compat
from rematc.measure import measure

SEED = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(32, 32), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(nn.functional.gelu(self.linear(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x)))
        return out


def net() -> Net:
    torch.manual_seed(SEED)
    return Net()


def batch(rows: int = 256) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(SEED))


def eager(budget: Any = None, **settings: Any) -> rematc.Backend:
    return rematc.backend(budget, inner="eager", **settings)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], rows: int = 256) -> list[Tensor]:
    """Those of one step; dropout draws the same numbers each time."""
    model.zero_grad()
    torch.manual_seed(SEED)
    run(batch(rows)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@functools.cache
def refusal(budget: int = 1000) -> rematc.BudgetError:
    with pytest.raises(rematc.BudgetError) as refused:
        torch.compile(net(), backend=eager(budget))(batch())
    torch._dynamo.reset()
    return refused.value


@functools.cache
def base_resident() -> int:
    return resident()


def resident(**settings: Any) -> int:
    """What rematc counts as resident for `net`."""
    torch._dynamo.reset()
    backend = eager(**settings)
    torch.compile(net(), backend=backend)(batch())
    return backend.problems[0].resident_bytes


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
    assert f"at op {error.step!r}" in str(error)
    assert f"budget={error.minimum_bytes}" in str(error)
    assert all(name in str(error) for name, _ in error.largest)


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
    peak = measure(step).peak_bytes + backend.problems[0].resident_bytes
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


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_batch_size_has_a_plan_of_its_own(dynamic: bool) -> None:
    """Also with dynamic=True: a plan keeps the budget at the sizes that it was made for, no others."""
    model, backend = Block(), eager("2MB")
    run = torch.compile(model, backend=backend, dynamic=dynamic)
    for rows in (256, 64, 256):
        ours = gradients(model, run, rows)
        torch.testing.assert_close(ours, gradients(model, model, rows))
    assert len(backend.plans) == 2
    assert backend.plans[0].peak_bytes > backend.plans[1].peak_bytes


def test_a_dynamic_size_that_outgrows_the_budget_is_refused() -> None:
    scale = nn.Parameter(torch.ones(32))
    run = torch.compile(lambda x: (x * scale).sin().exp(), backend=eager(200_000), dynamic=True)
    run(batch(64)).sum().backward()
    with pytest.raises(rematc.BudgetError):
        run(batch(4096))


def test_a_number_that_varies_from_call_to_call() -> None:
    """Dynamo makes it an input of the graph from the second call on; the backward pass reads it too."""
    model, backend = Block().eval(), eager("2MB")

    def scaled(x: Tensor, k: int) -> Tensor:
        return (model(x) * k).sin()

    run = torch.compile(scaled, backend=backend)
    for k in (3, 5, 7):
        ours = gradients(model, lambda x, k=k: run(x, k))  # type: ignore[misc]
        torch.testing.assert_close(ours, gradients(model, lambda x, k=k: scaled(x, k)))  # type: ignore[misc]
    assert len(backend.plans) == 2


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
        compat.check_torch((2, 4))


def test_an_untested_torch_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rematc"):
        compat.check_torch((2, 99))
        compat.check_torch((2, 99))
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


def test_a_partitioner_can_be_pickled_and_its_plans_are_no_setting() -> None:
    """Inductor's cache key is made of this pickle: equal for equal settings, whatever was planned."""
    ours = rematc.partitioner("2MB")
    before = pickle.dumps(ours)
    ours.plans.append(rematc.Plan((), ()))
    assert pickle.dumps(ours) == before == pickle.dumps(rematc.partitioner("2MB"))
    assert before != pickle.dumps(rematc.partitioner("3MB"))
    assert pickle.loads(before).uuid() == ours.uuid()
