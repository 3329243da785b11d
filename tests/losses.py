"""A classifier whose loss is not in it: the logits are larger than all that its blocks keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.blocks import Block, batch

CLASSES, WIDTH, ROWS = 500, 32, 256
LOGITS = 4 * CLASSES * ROWS


class Classifier(nn.Module):
    """Its loss is not in it: the logits are larger than all that its blocks keep."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


def labels() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def training(backend: Any) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model, x, y = Classifier(), batch(), labels()
    run = model if backend is None else torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad()
        logits = run(x)
        F.cross_entropy(logits, y).backward()

    return model, step


def gradients_of(backend: Any) -> list[Tensor]:
    model, step = training(backend)
    step()
    return [p.grad for p in model.parameters() if p.grad is not None]
