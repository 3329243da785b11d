"""Numbers that vary from call to call, which Dynamo makes inputs of the graph: none is a constant of a plan.

The loss is outside of the graph, so that it is planned anew once that was found out, by when the number of
that step could have become a constant: the gradients of later steps were wrong, and nothing said so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc.measure import measure
from rematc.options import Inner

ROWS, WIDTH, LAYERS = 128, 64, 6
BUDGET = 650_000  # less than all that is saved takes, with the loss
pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Number = int | float
How = Callable[[Tensor, Any], Tensor]


def times(x: Tensor, n: Number) -> Tensor:
    return x * n


def within(x: Tensor, n: Number) -> Tensor:
    return x.clamp(-n, n).sin()


def turned(x: Tensor, n: Number) -> Tensor:
    return x * math.sin(n) + n**2


def scheduled(x: Tensor, n: int) -> Tensor:
    return x * (1 / n) + x.new_full((), n)


WHOLE, BROKEN = (3, 3, 3, 5, 7, 9, 11), (0.3, 0.3, 0.3, 0.4, 0.5, 0.6, 0.7)
WAYS: dict[str, tuple[How, tuple[Number, ...]]] = {
    **{f"{how.__name__}, whole": (how, WHOLE) for how in (times, within, turned, scheduled)},
    **{f"{how.__name__}, not whole": (how, BROKEN) for how in (times, turned)},
}


class Model(nn.Module):
    """Layers, each with the number in it."""

    def __init__(self, how: How) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.how = how

    def forward(self, x: Tensor, n: Any) -> Tensor:
        for layer in self.layers:
            x = self.how(layer(x), n).sin()
        return x


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def steps(how: How, numbers: tuple[Number, ...], backend: Any) -> Iterator[list[Tensor]]:
    """The gradients of each step."""
    torch._dynamo.reset()
    model = Model(how)
    run = torch.compile(model, backend=backend)
    for n in numbers:
        model.zero_grad()
        torch.manual_seed(2)
        run(batch(), n).exp().tanh().mean().backward()
        yield [p.grad.clone() for p in model.parameters() if p.grad is not None]


def backend_of(inner: Inner) -> rematc.Backend:
    return rematc.backend(BUDGET, inner=inner, costs="roofline", time_limit_s=1.0)


def assert_planned_anew(backend: rematc.Backend) -> None:
    """With the number as it was in the first steps, and with it open; and both times with the loss."""
    assert [plan.cost_ns > 0 for plan in backend.plans] == [True, True]


@pytest.mark.parametrize("way", WAYS)
def test_each_step_has_the_number_that_it_was_given(way: str) -> None:
    how, numbers = WAYS[way]
    backend = backend_of("eager")
    ours = list(steps(how, numbers, backend))
    if how is times:  # some torch versions fix the others themselves, and each gets a plan
        assert_planned_anew(backend)
    for n, mine, other in zip(numbers, ours, steps(how, numbers, "aot_eager"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), n


@pytest.mark.parametrize(
    "numbers", [pytest.param(WHOLE, id="whole"), pytest.param(BROKEN, id="not whole", marks=pytest.mark.slow)]
)
def test_each_step_has_the_number_that_it_was_given_under_inductor(numbers: tuple[Number, ...]) -> None:
    backend = backend_of("inductor")
    ours = list(steps(times, numbers, backend))
    assert_planned_anew(backend)
    for mine, other in zip(ours, steps(times, numbers, "aot_eager"), strict=True):
        for a, b in zip(mine, other, strict=True):  # each layer multiplies what was rounded
            assert (a - b).abs().max() <= 1e-2 * b.abs().max()


def test_a_step_with_another_number_keeps_the_budget() -> None:
    model, backend = Model(times), backend_of("eager")
    run = torch.compile(model, backend=backend)

    def step(n: int) -> None:
        run(x, n).exp().tanh().mean().backward()
        model.zero_grad()

    x = batch()
    for n in WHOLE[:-1]:
        step(n)
    taken = measure(lambda: step(WHOLE[-1])).peak_bytes
    assert backend.resident_bytes + taken <= BUDGET
    assert_planned_anew(backend)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_each_step_has_the_strides_that_it_was_given(inner: Inner) -> None:
    """They vary too, and rows of the batch are read as they lie."""
    strides = (64, 64, 64, 80, 96, 112, 128)
    there = torch.randn(ROWS * strides[-1], generator=torch.Generator().manual_seed(1))

    def gradients(backend: Any) -> Iterator[list[Tensor]]:
        torch._dynamo.reset()
        model = Model(lambda x, y: x + y.flatten().view(ROWS, WIDTH))
        run = torch.compile(model, backend=backend)
        for stride in strides:
            model.zero_grad()
            x = torch.as_strided(there, (ROWS, WIDTH), (stride, 1))
            run(x, x).exp().tanh().mean().backward()
            yield [p.grad.clone() for p in model.parameters() if p.grad is not None]

    backend = backend_of(inner)
    ours = list(gradients(backend))
    assert_planned_anew(backend)
    for mine, other in zip(ours, gradients("aot_eager"), strict=True):
        torch.testing.assert_close(mine, other, **({"rtol": 0, "atol": 0} if inner == "eager" else {}))
