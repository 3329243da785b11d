"""A net whose middle a test chooses, for what is done with autograd around it or inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import ROWS, WIDTH, Results, Trained

LAYERS = 2


class Net(nn.Module):
    """Layers with a ``middle`` between them, a loss in float, and an optimizer."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.middle = middle
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, eps=1e-3)  # 1e-8 is 0 in float16

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.middle(F.gelu(layer(x))).sin()
        return x.float().square().mean()


def leaf() -> Results:
    return (torch.randn(ROWS, WIDTH).requires_grad_(),)


def gradients(t: Trained) -> Results:
    return tuple(p.grad for p in t.model.parameters() if p.grad is not None)


class Two(Net):
    """Two losses of one forward pass."""

    def forward(self, x: Tensor) -> Results:  # type: ignore[override]
        return super().forward(x), self.layers[0](x).cos().mean()
