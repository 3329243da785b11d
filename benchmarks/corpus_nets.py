"""Models of the corpus that are written out here: convolutions, recurrence, a state space, experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.corpus_trace import Case


def _classified(model: nn.Module, batch: int, size: int, classes: int = 1000) -> Case:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return Case(model.train(), {"x": images}, lambda logits: F.cross_entropy(logits, labels))


def mlp(batch: int = 4096, width: int = 1024, depth: int = 48) -> Case:
    """A chain of linear layers, each with GELU and LayerNorm."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)]
    model, x = nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(batch, width)
    labels = torch.randint(0, 10, (batch,))
    return Case(model.train(), {"input": x}, lambda logits: F.cross_entropy(logits, labels))


class VGG(nn.Module):
    """VGG-16 with BatchNorm (Simonyan and Zisserman 2015)."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 512)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        wide_in = 3
        for width, many in zip(widths, (2, 2, 3, 3, 3), strict=True):
            for _ in range(many):
                layers += [nn.Conv2d(wide_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                wide_in = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(wide_in * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(),
            nn.Dropout(), nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, 1000) of images (batch, 3, 224, 224)."""
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


def vgg16() -> Case:
    """64 images of 224 x 224."""
    return _classified(VGG(), 64, 224)


class _DenseLayer(nn.Module):
    """What it adds to all that is there: BatchNorm, ReLU and convolution, twice."""

    def __init__(self, wide_in: int, growth: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.BatchNorm2d(wide_in), nn.ReLU(), nn.Conv2d(wide_in, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, features: list[Tensor]) -> Tensor:
        new: Tensor = self.mix(torch.cat(features, 1))
        return new


class DenseNet(nn.Module):
    """DenseNet-121: each layer reads all layers before it in its block (Huang et al. 2017)."""

    def __init__(self, growth: int = 32, depths: tuple[int, ...] = (6, 12, 24, 16)) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        self.blocks, self.between = nn.ModuleList(), nn.ModuleList()
        for depth in depths:
            self.blocks.append(nn.ModuleList(_DenseLayer(width + i * growth, growth) for i in range(depth)))
            width += depth * growth
            narrow = [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            is_last = len(self.blocks) == len(depths)
            self.between.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), *([] if is_last else narrow)))
            width = width if is_last else width // 2
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, 1000) of images (batch, 3, height, width)."""
        x = self.stem(x)
        for block, between in zip(self.blocks, self.between, strict=True):
            features = [x]
            for layer in block.children():
                features.append(layer(features))
            x = between(torch.cat(features, 1))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def densenet() -> Case:
    """64 images of 224 x 224."""
    return _classified(DenseNet(), 64, 224)


def _double(wide_in: int, wide_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(wide_in, wide_out, 3, padding=1, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(wide_out, wide_out, 3, padding=1, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down four times and up again, each level joined to its peer (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        pairs = list(pairwise(width << i for i in range(depth + 1)))
        self.first = _double(3, width)
        self.down = nn.ModuleList(_double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(_double(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, 2, height, width) of images (batch, 3, height, width)."""
        x, skips = self.first(x), []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def unet() -> Case:
    """8 images of 512 x 512, each pixel of one of two classes."""
    images, labels = torch.randn(8, 3, 512, 512), torch.randint(0, 2, (8, 512, 512))
    return Case(UNet().train(), {"x": images}, lambda logits: F.cross_entropy(logits, labels))


class LSTM(nn.Module):
    """A language model of LSTM cells (Hochreiter and Schmidhuber 1997), unrolled step by step."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.from_x = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.from_h = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) of tokens (batch, length)."""
        x = self.token(tokens)
        for from_x, from_h in zip(self.from_x, self.from_h, strict=True):
            h = c = torch.zeros_like(x[:, 0])
            steps = []
            for gates in from_x(x).unbind(1):
                i, f, g, o = (gates + from_h(h)).chunk(4, dim=-1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                steps.append(h)
            x = F.dropout(torch.stack(steps, 1), 0.2, self.training)
        logits: Tensor = self.head(x)
        return logits


def lstm() -> Case:
    """Two layers of 1024 over 64 steps, 256 rows."""
    tokens = torch.randint(0, 10_000, (256, 64))
    return _modelled(LSTM(10_000, 1024, 2), tokens)


def _modelled(model: nn.Module, tokens: Tensor) -> Case:
    """The next token is to be told from those before it."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return Case(model.train(), {"tokens": tokens}, loss)


class _DiTBlock(nn.Module):
    """Attention and an MLP; the condition says how each is scaled, shifted and let in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.told = heads, nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """As ``x``, (batch, patches, width)."""
        told = self.told(F.silu(condition))[:, None].chunk(6, dim=-1)
        x = x + told[2] * self._attended(self.norm(x) * (1 + told[0]) + told[1])
        return x + told[5] * self.narrow(F.gelu(self.wide(self.norm(x) * (1 + told[3]) + told[4])))

    def _attended(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class DiT(nn.Module):
    """A diffusion transformer with adaptive LayerNorm (Peebles and Xie 2023)."""

    def __init__(self, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches, self.condition = nn.Linear(patch, width), nn.Linear(64, width)
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, patch)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """What is told of the noise in each patch, as ``x``, (batch, patches, patch)."""
        x, condition = self.patches(x), self.condition(condition)
        for block in self.blocks:
            x = block(x, condition)
        noise: Tensor = self.head(x)
        return noise


def dit() -> Case:
    """DiT-B, 32 latents of 32 x 32 in patches of 2 x 2."""
    inputs = {"x": torch.randn(32, 256, 16), "condition": torch.randn(32, 64)}
    return Case(DiT(16, 768, 12, 12).train(), inputs, lambda noise: noise.square().mean())


class GRU(nn.Module):
    """Layers of GRU cells (Cho et al. 2014), unrolled, each step through all of them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """As ``x``, (length, batch, width)."""
        states, steps = [torch.zeros_like(x[0]) for _ in self.cells], []
        for y in x.unbind():
            for n, cell in enumerate(self.cells):
                states[n] = y = cell(y, states[n])
            steps.append(y)
        return torch.stack(steps)


def gru() -> Case:
    """Two layers of 256 over 32 steps, 128 rows."""
    return Case(GRU(256, 2).train(), {"x": torch.randn(32, 128, 256)}, lambda y: y.square().mean())


NETS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "vgg16": vgg16,
    "densenet": densenet,
    "unet": unet,
    "lstm": lstm,
    "dit": dit,
    "gru": gru,
}
