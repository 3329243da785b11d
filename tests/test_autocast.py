"""Backward called inside of an autocast that the forward pass did not run in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc
from rematc.measure import measure

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ROWS, WIDTH = 512, 64


def model() -> nn.Module:
    """Autocast knows all of its ops: it casts those of the products down and others to one dtype."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Softmax(-1)]
    return nn.Sequential(*layers)


def step(net: nn.Module, backend: Any, dtype: torch.dtype | None) -> Callable[[], None]:
    """A step of ``net``; its loss and backward pass, nothing else, are inside of autocast to ``dtype``."""
    torch._dynamo.reset()
    run: Callable[[Tensor], Tensor] = torch.compile(net, backend=backend)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def forward_and_backward() -> None:
        net.zero_grad()
        out = run(x)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            out.square().mean().backward()

    return forward_and_backward


def gradients(backend: Any, dtype: torch.dtype | None) -> list[Tensor]:
    net = model()
    step(net, backend, dtype)()
    return [p.grad for p in net.parameters() if p.grad is not None]


def tight(inner: Any) -> int:
    """A budget with room for the loss, which is outside of the graph, and known when it has run."""
    with pytest.raises(rematc.BudgetError) as refused:
        gradients(rematc.backend(1, inner=inner), None)
    return refused.value.minimum_bytes * 6 // 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_op_by_op_what_is_recomputed_has_the_bits_and_the_peak_that_it_has_outside(
    dtype: torch.dtype,
) -> None:
    budget = tight("eager")
    backend, expected = rematc.backend(budget, inner="eager"), gradients("aot_eager", None)
    net = model()
    trained = step(net, backend, dtype)
    trained()
    assert measure(trained).peak_bytes + backend.resident_bytes <= budget
    assert backend.plans[0].cost_ns > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected, strict=True))


@pytest.mark.slow
def test_under_inductor_too() -> None:
    expected = gradients("inductor", None)
    backend = rematc.backend(tight("inductor"))
    for ours, theirs in zip(gradients(backend, torch.bfloat16), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert backend.plans[0].cost_ns > 0
