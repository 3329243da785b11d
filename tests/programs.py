"""Small models made up at random: chains of ops with branches, views, in-place ops, random ops and state.

A `Program` is data, so that hypothesis can make one and shrink it: each line names an op and the earlier
values that it reads. All values have one shape, whatever an op does inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, WEIGHTS = 6, 8, 2
Line = tuple[str, int, int]


@dataclass(frozen=True)
class Program:
    """``lines``: op, and two earlier values counted from the latest; ``results``: what is returned."""

    lines: tuple[Line, ...]
    results: tuple[int, ...]


class Double(torch.autograd.Function):
    """Somebody's own function, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (2 + 0 * x.cos())


class Made(nn.Module):
    """A program with its weights, two of which every matrix product shares, and its state."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        make = torch.Generator().manual_seed(7)
        shape = (WIDTH, WIDTH)
        self.weights = nn.ParameterList(torch.randn(shape, generator=make) / 3 for _ in range(WEIGHTS))
        self.frozen = nn.Parameter(torch.randn(shape, generator=make) / 3, requires_grad=False)
        self.norm, self.layer_norm = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(WIDTH, WIDTH)
        nn.init.normal_(self.table.weight, generator=make)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """All results of the program, the inputs being its first two values."""
        values = [x, y]
        for op, a, b in self.program.lines:
            values.append(OPS[op](self, values[-1 - a % len(values)], values[-1 - b % len(values)]))
        return tuple(values[-1 - r % len(values)] for r in self.program.results)


Op = Callable[[Made, Tensor, Tensor], Tensor]


def _in_place(_: Made, x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:5].mul_(y[:, :4])
    return out.relu_()


def _averaged(m: Made, x: Tensor, _: Tensor) -> Tensor:
    before = x * (m.average + 1).sin()  # its backward pass needs what was there
    m.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return before - m.average


def _without_gradient(_: Made, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True) + 1
    return y / scale


def _in_bfloat16(m: Made, x: Tensor, _: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.gelu(x @ m.weights[0]).float()


def _attended(_: Made, x: Tensor, y: Tensor) -> Tensor:
    q, k = (z.view(1, 2, ROWS, WIDTH // 2) for z in (x, y))
    return F.scaled_dot_product_attention(q, k, q, dropout_p=0.3).reshape(ROWS, WIDTH)


def _turned(_: Made, x: Tensor, y: Tensor) -> Tensor:
    angle = torch.polar(torch.ones(ROWS, WIDTH // 2), y[:, : WIDTH // 2])
    turned = torch.view_as_complex(x.view(ROWS, WIDTH // 2, 2).contiguous()) * angle
    return torch.view_as_real(turned).reshape(ROWS, WIDTH)


def _sorted(_: Made, x: Tensor, y: Tensor) -> Tensor:
    values, order = x.sort(-1)
    return values + y.gather(-1, order)


def _split(_: Made, x: Tensor, y: Tensor) -> Tensor:
    (a, b), (c, d) = x.chunk(2, -1), y.split(WIDTH // 2, -1)
    return torch.cat([a.sin() * d, b + c], -1)


def _by_variance(_: Made, x: Tensor, y: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (y - mean) * (variance + 1).rsqrt()


def _checkpointed(m: Made, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = checkpoint(
        lambda a: F.silu(a @ m.weights[1]).exp().clamp(max=3), x + y, use_reentrant=False
    )
    return found


def _looked_up(m: Made, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = m.table(x.argmax(-1)) + y
    return out


PURE: dict[str, Op] = {
    "sin": lambda _, x, y: x.sin(),
    "gelu": lambda _, x, y: F.gelu(x),
    "tanh": lambda _, x, y: x.tanh(),
    "softmax": lambda _, x, y: x.softmax(-1),
    "logsumexp": lambda _, x, y: x - y.logsumexp(-1, keepdim=True),
    "add": lambda _, x, y: x + y,
    "multiply": lambda _, x, y: x * y,
    "where": lambda _, x, y: torch.where(x > 0.1, x, 0.5 * y),
    "product": lambda m, x, y: x @ m.weights[0],
    "other product": lambda m, x, y: y @ m.weights[1].t(),
    "frozen": lambda m, x, y: x @ m.frozen,
    "layer norm": lambda m, x, y: m.layer_norm(x),
    "transposed": lambda _, x, y: x.t().reshape(ROWS, WIDTH) * 0.9,
    "rows": lambda _, x, y: torch.stack([r.tanh() for r in x.unbind(0)[::-1]]),
    "column": lambda _, x, y: x[:, 2:3].expand(ROWS, WIDTH) * y,
    "detached": lambda _, x, y: x.detach() * y,
    "variance": _by_variance,
    "mask": lambda _, x, y: (x > y).float() * x,
    "view": lambda _, x, y: x.view(-1).view(ROWS, WIDTH),
    "spectrum": lambda _, x, y: torch.fft.fft(x, dim=-1).abs() * 0.3,
    "own function": lambda _, x, y: Double.apply(x),
    "in place": _in_place,
    "sorted": _sorted,
    "split": _split,
    "turned": _turned,
    "looked up": _looked_up,
    "without gradient": _without_gradient,
    "bfloat16": _in_bfloat16,
    "checkpoint": _checkpointed,
}
RANDOM: dict[str, Op] = {
    "dropout": lambda _, x, y: F.dropout(x, 0.4),
    "noise": lambda _, x, y: x + 0.1 * torch.randn_like(y),
    "uniform": lambda _, x, y: x * torch.rand(ROWS, WIDTH),
    "bernoulli": lambda _, x, y: y * torch.bernoulli(x.sigmoid()),
    "gumbel": lambda _, x, y: F.gumbel_softmax(x, hard=True) * y,
    "drawn": lambda m, x, y: m.table(torch.multinomial(x.softmax(-1), 1).squeeze(-1)) * y,
    "attention": _attended,
}
STATE: dict[str, Op] = {"batch norm": lambda m, x, y: m.norm(x), "average": _averaged}
OPS = {**PURE, **RANDOM, **STATE}


def programs(most: int = 14) -> st.SearchStrategy[Program]:
    """Programs of up to ``most`` lines."""
    before = st.one_of(st.integers(0, 2), st.integers(0, most))
    lines = st.lists(st.tuples(st.sampled_from(sorted(OPS)), before, before), min_size=1, max_size=most)
    results = st.lists(st.integers(0, most), min_size=1, max_size=3)
    return st.builds(Program, lines.map(tuple), results.map(tuple))
