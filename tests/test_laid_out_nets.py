"""Nets whose values lie otherwise than their traces have it: the budget is a bound, the bits are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from tests.misled import Attended, pair

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SHARES = 1.0, 1.4  # of the smallest budget


class Nearest(nn.Module):
    """The gradient of a loss has the strides of its target, which convolution's backward pass then takes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 16, 4, 2, 1), nn.Conv2d(16, 16, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.leave(F.silu(self.enter(x))).permute(0, 2, 3, 1)
        return F.mse_loss(made, made.detach().contiguous().round())


class Turned(nn.Module):
    """The gradient of a product has a view, flat, that there is not of what `hardswish_backward` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(F.hardswish(first(x.transpose(0, 1)).transpose(0, 1))).sin()
        return x.square().mean()


class Drawn(nn.Module):
    """Which elements dropout drops depends on their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(F.dropout(pair(self.enter(x))[1].tanh(), 0.4).exp()).square().mean()
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nearest": (Nearest, (4, 3, 32, 32)),
    "turned": (Turned, (8, 64, 16)),
    "drawn": (Drawn, (128, 16)),
    "attended": (Attended, (1, 3, 16, 16)),
}
ROUNDED = ("attended",)  # a convolution of other strides adds up in another order


def verified(name: str, budget: Any) -> rematc.Verification:
    torch._dynamo.reset()
    torch.manual_seed(1)
    make, shape = MODELS[name]
    return rematc.verify(make(), torch.randn(shape), budget, inner="eager", costs="roofline")


@pytest.mark.parametrize("name", MODELS)
def test_the_budget_is_a_bound_and_the_bits_are_eager_s(name: str) -> None:
    with pytest.raises(rematc.BudgetError) as refused:
        verified(name, 1)
    for share in SHARES:
        found = verified(name, int(share * refused.value.minimum_bytes))
        assert found.of_largest < 1e-5 if name in ROUNDED else found.difference == 0
        assert 0.97 * found.predicted_bytes <= found.measured_bytes <= found.predicted_bytes
