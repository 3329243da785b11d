"""Models of the corpus that read far back: a condition for each layer, a pyramid's features, ways across."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.corpus_trace import Case


class _FilmBlock(nn.Module):
    """Two gated convolutions; a condition scales what goes in and what comes out (Perez et al. 2018)."""

    def __init__(self, width: int, told: int) -> None:
        super().__init__()
        self.told, self.norm = nn.Linear(told, 4 * width), nn.GroupNorm(8, width)
        self.wide, self.narrow = nn.Conv1d(width, 2 * width, 5, padding=2), nn.Conv1d(width, width, 1)
        self.mixed = nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """As ``x``, (batch, width, length)."""
        scale, shift, first, second = self.told(F.silu(condition))[:, :, None].chunk(4, 1)
        held, gate = self.wide(self.norm(x) * (1 + scale) + shift).chunk(2, 1)
        x = x + first * self.narrow(torch.tanh(held) * torch.sigmoid(gate))
        return x + second * self.mixed(F.gelu(x.transpose(1, 2))).transpose(1, 2)


class Film(nn.Module):
    """Blocks of 1-d convolutions that one condition steers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.condition = nn.Conv1d(4, width, 3, padding=1), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(_FilmBlock(width, 32) for _ in range(depth))
        self.last = nn.Conv1d(width, 4, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """As ``x``, (batch, 4, length)."""
        x, condition = self.first(x), self.condition(condition)
        for block in self.blocks:
            x = block(x, condition)
        out: Tensor = self.last(x)
        return out


def film() -> Case:
    """Eight blocks, 64 sequences of 4096."""
    inputs = {"x": torch.randn(64, 4, 4096), "condition": torch.randn(64, 16)}
    return Case(Film(48, 8).train(), inputs, lambda y: y.square().mean())


class _Bottleneck(nn.Module):
    """Three convolutions with BatchNorm and a way past them (He et al. 2016)."""

    def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
        super().__init__()
        width = wide_out // 4
        sizes = ((wide_in, width, 1, 1), (width, width, 3, stride), (width, wide_out, 1, 1))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o))
            for i, o, k, s in sizes
        )
        self.past = nn.Conv2d(wide_in, wide_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, wide_out, height / stride, width / stride)."""
        first, second, third = self.parts
        return F.relu(self.past(x) + third(F.relu(second(F.relu(first(x))))))


class Pyramid(nn.Module):
    """A feature pyramid on a residual network, one head for all levels (Lin et al. 2017)."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 256) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 4, 3)
        wides = [256 * 2**n for n in range(len(blocks))]
        self.levels = nn.ModuleList(
            nn.Sequential(
                *(_Bottleneck(wide if n else before, wide, 1 if n else stride) for n in range(many))
            )
            for many, before, wide, stride in zip(blocks, (64, *wides), wides, (1, 2, 2, 2), strict=False)
        )
        self.across = nn.ModuleList(nn.Conv2d(wide, width, 1) for wide in wides)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in wides)
        layers = [m for _ in range(4) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
        self.head = nn.Sequential(*layers, nn.Conv2d(width, 80, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the squared answers, of images (batch, 3, height, width)."""
        found, x = [], self.stem(x)
        for level in self.levels:
            x = level(x)
            found.append(x)
        total, down = x.new_zeros(()), None
        for across, smooth, level in reversed(list(zip(self.across, self.smooth, found, strict=True))):
            here = across(level)
            down = here if down is None else here + F.interpolate(down, scale_factor=2.0)
            total = total + self.head(smooth(down)).square().mean()
        return total


def fpn() -> Case:
    """8 images of 512 x 512."""
    return Case(Pyramid().train(), {"x": torch.randn(8, 3, 512, 512)}, lambda total: total)


class _Res(nn.Module):
    """Two convolutions that a time is told to, and attention over all places if ``heads``."""

    def __init__(self, wide_in: int, wide_out: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, wide) for wide in (wide_in, wide_out))
        self.first = nn.Conv2d(wide_in, wide_out, 3, padding=1)
        self.second = nn.Conv2d(wide_out, wide_out, 3, padding=1)
        self.past, self.told = nn.Conv2d(wide_in, wide_out, 1), nn.Linear(512, wide_out)
        self.attention = nn.MultiheadAttention(wide_out, heads, batch_first=True) if heads else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(batch, wide_out, height, width)."""
        h = self.first(F.silu(self.norms[0](x))) + self.told(F.silu(time))[:, :, None, None]
        x = self.past(x) + self.second(F.silu(self.norms[1](h)))
        if self.attention is not None:
            places = x.flatten(2).transpose(1, 2)
            mixed, _ = self.attention(places, places, places, need_weights=False)
            x = x + mixed.transpose(1, 2).unflatten(2, x.shape[2:])
        return x


class Denoiser(nn.Module):
    """A U-Net of residual blocks with attention, as diffusion models have it (Ho et al. 2020)."""

    def __init__(self, wides: tuple[int, ...] = (128, 256, 512, 512)) -> None:
        super().__init__()
        self.first, before, kept = nn.Conv2d(4, wides[0], 3, padding=1), wides[0], [wides[0]]
        self.time = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 512))
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for n, wide in enumerate(wides):
            self.down += [_Res(before, wide, 8 * (n > 0)), _Res(wide, wide, 8 * (n > 0))]
            kept += [wide, wide]
            before = wide
            if n < len(wides) - 1:
                self.down.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                kept.append(wide)
        self.middle = _Res(before, before, 8)
        for n, wide in reversed(list(enumerate(wides))):
            for _ in range(3):
                self.up.append(_Res(before + kept.pop(), wide, 8 * (n > 0)))
                before = wide
            if n:
                self.up.append(nn.Conv2d(wide, wide, 3, padding=1))
        self.last = nn.Conv2d(before, 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """As ``x``, (batch, 4, height, width)."""
        time, x = self.time(time), self.first(x)
        kept = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, _Res) else part(x)
            kept.append(x)
        x = self.middle(x, time)
        for part in self.up:
            if isinstance(part, _Res):
                x = part(torch.cat([x, kept.pop()], 1), time)
            else:
                x = part(F.interpolate(x, scale_factor=2.0))
        noise: Tensor = self.last(x)
        return noise


def denoiser() -> Case:
    """8 latents of 64 x 64."""
    inputs = {"x": torch.randn(8, 4, 64, 64), "time": torch.randn(8, 128)}
    return Case(Denoiser().train(), inputs, lambda noise: noise.square().mean())


FAR: dict[str, Callable[[], Case]] = {"film": film, "fpn": fpn, "denoiser": denoiser}
