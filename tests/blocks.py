"""Four small blocks, compiled in one graph, in two, or one by one: what the tests of steps run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc
from rematc.backend import Backend
from rematc.measure import measure

WIDTH, ROWS = 32, 256


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Four blocks, and a graph break where it is asked for."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(Block(), Block()) for _ in range(2))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.first, *self.second]


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def made(how: str, backend: Backend) -> tuple[Model, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = Model(broken=how == "graph break")
    if how in ("one graph", "graph break"):
        return model, torch.compile(model, backend=backend)
    for block in model.blocks:
        block.compile(backend=backend if how == "blocks" else Backend(backend.options))
    return model, model


def resident(model: nn.Module) -> int:
    return 4 * (sum(p.numel() for p in model.parameters()) + ROWS * WIDTH)


def step_of(model: nn.Module, run: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    x = batch()

    def step() -> None:
        run(x).backward()
        model.zero_grad(set_to_none=True)

    return step


def peak(model: nn.Module, run: Callable[[Tensor], Tensor]) -> int:
    return resident(model) + measure(step_of(model, run)).peak_bytes


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    run(batch()).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    compiler = rematc.backend.__globals__["_Compiler"]
    original = compiler.__call__

    def counted(self: Any, inputs: Any, given: Any) -> Any:
        seen.append(given)
        return original(self, inputs, given)

    monkeypatch.setattr(compiler, "__call__", counted)
    return seen


class _OneNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Tensor) -> Tensor:
        ctx.shapes = [arg.shape for arg in args]
        return torch.stack([arg.sum() for arg in args]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(grads[0].expand(shape) for shape in ctx.shapes)


def one_node(*args: Tensor) -> Tensor:
    """The sum of ``args``, by a single node of Python's, which is how a compiled graph looks to autograd."""
    found: Tensor = _OneNode.apply(*args)
    return found
