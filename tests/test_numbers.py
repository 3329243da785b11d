"""What varies from call to call: numbers, strides, and where a batch lies in its data.

None may become a constant of the code. It could where a graph is planned anew between two steps, as for a
loss outside of it: the gradients of later steps were wrong, and nothing said so.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.arguments import Arguments
from rematc.compiled import Compiled, Given
from rematc.measure import measure
from rematc.options import Inner
from rematc.steps import Steps

ROWS, WIDTH, LAYERS = 128, 64, 3
pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Number = int | float
Args = tuple[Any, ...]  # of a step: the batch, and what else its graph is given
# Of two steps one is planned anew: with a number that has come before, and that does not come again.
WHOLE, BROKEN = (3, 3, 5, 7, 9, 3, 11), (0.3, 0.3, 0.4, 0.4, 0.6, 0.5, 0.3, 0.7)
DATA = torch.randn(8 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Layers, each with something of what the step was given in it."""

    def __init__(self, how: Callable[..., Tensor], layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.how = how

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        for layer in self.layers:
            x = self.how(layer(x), *given).sin()
        return x


def numbers(given: Sequence[Number]) -> list[Args]:
    return [(DATA[:ROWS], n) for n in given]


def strided(stride: int) -> Tensor:
    return torch.as_strided(DATA, (ROWS, WIDTH), (stride, 1))


HOWS: dict[str, tuple[Callable[..., Tensor], list[Args]]] = {
    "a factor": (lambda x, n: x * n, numbers(WHOLE)),
    "a bound": (lambda x, n: x.clamp(-n, n), numbers(WHOLE)),
    "a power": (lambda x, n: x * math.sin(n) + n**2, numbers(WHOLE)),
    "a schedule": (lambda x, n: x * (1 / n) + x.new_full((), n), numbers(WHOLE)),
    "a comparison": (lambda x, n: torch.where(x > n - 4, x, x.cos()), numbers(WHOLE)),
    "an offset": (lambda x, n: x + x.roll(n, 0), numbers(WHOLE)),
    "a broken factor": (lambda x, n: x * n, numbers(BROKEN)),
    "a broken bound": (lambda x, n: x.clamp(-n, n), numbers(BROKEN)),
    "a broken slope": (lambda x, n: F.leaky_relu(x * n, n), numbers(BROKEN)),
    "a rate": (lambda x, n: F.dropout(x, n), numbers(BROKEN)),
    "batches of data": (lambda x, n: x * (1 + n), [(DATA[i * ROWS :][:ROWS], i) for i in range(7)]),
    "a view of data": (
        lambda x, n: x * n,
        [(DATA.view(4, -1, WIDTH)[n % 4][:ROWS] if n > 4 else DATA[:ROWS], n) for n in WHOLE],
    ),
    "strides": (
        lambda x, y: x + y.flatten().view(ROWS, WIDTH),
        [(x := strided(s), x) for s in (64, 80, 80, 96, 112, 80, 128)],
    ),
}


def trained(how: Callable[..., Tensor], steps: list[Args], backend: Any) -> list[list[Tensor]]:
    """The gradients of each step."""
    torch._dynamo.reset()
    model, found = Model(how), []
    run = torch.compile(model, backend=backend)
    for args in steps:
        model.zero_grad()
        torch.manual_seed(2)
        run(*args).exp().tanh().mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found


def backend_of(inner: Inner, budget: int = 5_000_000) -> rematc.Backend:
    return rematc.backend(budget, inner=inner, costs="roofline", time_limit_s=1.0)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> list[Args]:
    """Every other step is planned anew, so that each plan also runs with what it was not made with."""
    seen: list[Args] = []

    def plan(steps: Steps, graph: Compiled, args: Arguments, held: int, left: int) -> None:
        seen.append(args.values)
        if len(seen) % 2:
            graph.made = graph.compile(list(args.values), Given(outside=graph.outside))

    monkeypatch.setattr(Steps, "_plan_alone", plan)
    monkeypatch.setattr(Steps, "_goes_on", lambda *_: False)  # each step is looked at
    return seen


@pytest.mark.parametrize("name", HOWS)
def test_each_step_has_what_it_was_given(name: str, anew: list[Args]) -> None:
    how, steps = HOWS[name]
    ours = trained(how, steps, backend_of("eager"))
    assert len(anew) >= len(steps)
    for n, (mine, other) in enumerate(zip(ours, trained(how, steps, "aot_eager"), strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), n


@pytest.mark.parametrize(
    "name",
    ["batches of data", *(pytest.param(n, marks=pytest.mark.slow) for n in ("a broken factor", "strides"))],
)
def test_each_step_has_what_it_was_given_under_inductor(name: str, anew: list[Args]) -> None:
    how, steps = HOWS[name]
    ours = trained(how, steps, backend_of("inductor"))
    assert len(anew) >= len(steps)
    for mine, other in zip(ours, trained(how, steps, "aot_eager"), strict=True):
        for a, b in zip(mine, other, strict=True):  # each layer multiplies what was rounded
            assert (a - b).abs().max() <= 1e-2 * b.abs().max()


def test_no_batch_is_kept(anew: list[Args]) -> None:
    model, kept = Model(lambda x, n: x * n), list[weakref.ref[Tensor]]()
    run = torch.compile(model, backend=backend_of("eager"))
    for n in WHOLE:
        x = DATA[:ROWS].clone()
        kept.append(weakref.ref(x))
        run(x, n).sum().backward()
        del x
        anew[-1] = ()
    gc.collect()
    assert not any(batch() is not None for batch in kept)


def test_a_loss_outside_is_planned_for_with_the_number_open() -> None:
    budget = 650_000  # less than all that is saved takes, with the loss
    model, backend = Model(lambda x, n: x * n, layers=6), backend_of("eager", budget)
    run, x = torch.compile(model, backend=backend), DATA[:ROWS].clone()

    def step(n: int) -> None:
        run(x, n).exp().tanh().mean().backward()
        model.zero_grad()

    for n in (3, 3, 3, 5, 7, 9):
        step(n)
    taken = measure(lambda: step(11)).peak_bytes
    assert backend.resident_bytes + taken <= budget
    assert [plan.cost_ns > 0 for plan in backend.plans] == [True, True]  # for 3, and for all others


# What takes memory is fixed


def repeated(x: Tensor, n: int) -> Tensor:
    return x + x.repeat(n, 1).sin().view(n, ROWS, WIDTH).sum(0)


def padded(x: Tensor, n: int) -> Tensor:
    return x


@pytest.mark.parametrize("how", [repeated, padded])
def test_a_number_that_makes_sizes_has_a_plan_for_each(how: Callable[..., Tensor]) -> None:
    """Also strides, where the memory of a batch is as large as they say."""
    budget = 1_600_000
    model, backend = Model(how), backend_of("eager", budget)
    run = torch.compile(model, backend=backend)
    weights = sum(4 * p.numel() for p in model.parameters())

    def step(n: int) -> None:
        x = torch.empty_strided((ROWS, WIDTH), (64 * n if how is padded else 64, 1)).fill_(1.0)
        run(x, n).square().mean().backward()
        model.zero_grad()

    for n in (3, 3, 3, 5, 5, 5, 11):
        step(n)
    assert weights + measure(lambda: step(5)).peak_bytes <= budget
    assert weights + measure(lambda: step(11)).peak_bytes <= budget
    assert len(backend.plans) == 3
    with pytest.raises(rematc.BudgetError):
        step(60)
