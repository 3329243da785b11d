"""A net of two blocks, and what the tests of the backend do with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematc

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
    return backend.resident_bytes
