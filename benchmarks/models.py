"""A small GPT in plain PyTorch, and text for it to learn: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ALPHABET = "0123456789+=;"


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a `GPT`; by default a step takes a fraction of a second on two cores."""

    layers: int = 8
    width: int = 128
    heads: int = 4
    length: int = 128
    vocabulary: int = len(ALPHABET)
    dropout: float = 0.1
    tied: bool = True


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(config.dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm_attention(x))
        mixed: Tensor = x + self.mlp(self.norm_mlp(x))
        return mixed

    def attention(self, x: Tensor) -> Tensor:
        """Each position looks at itself and those before it."""
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(mixed, self.dropout, self.training)


class GPT(nn.Module):
    """A language model that returns its loss.

    ``checkpoint_every`` saves only what enters each segment of that many blocks and runs the
    segment again in the backward pass (`torch.utils.checkpoint`); 0 saves everything. The square
    root of the number of blocks is Chen et al.'s choice (https://arxiv.org/abs/1604.06174).

    >>> model = GPT(GPTConfig(layers=2, width=16, heads=2, length=8))
    >>> model(*batch(3, length=8)).shape
    torch.Size([])
    """

    def __init__(self, config: GPTConfig | None = None, checkpoint_every: int = 0) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.checkpoint_every = checkpoint_every
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_init)
        if config.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats of ``targets`` after ``tokens``, both (batch, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        if self.checkpoint_every and self.training:
            for first in range(0, len(self.blocks), self.checkpoint_every):
                x = checkpoint(self._segment, x, first, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _segment(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks[first : first + self.checkpoint_every]:
            x = block(x)
        return x


def _init(module: nn.Module) -> None:
    """GPT-2's initialization: normal with deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def batch(size: int = 16, length: int = GPTConfig.length, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Lines of sums, such as "7+5=12;", as tokens and the tokens that follow: (size, length) each.

    The answers and the form can be learned, the two random digits of each sum can't: the loss falls
    from 2.56 (all of `ALPHABET` alike) and can't pass 0.71. The same seed gives the same batch.

    >>> tokens, targets = batch(2, length=12, seed=1)
    >>> bool((tokens[:, 1:] == targets[:, :-1]).all()), tokens.shape
    (True, torch.Size([2, 12]))
    """
    generator = torch.Generator().manual_seed(seed)
    sums = (length + 1) // 4 + 1  # the shortest, "0+0=0;", has six characters
    pairs = torch.randint(0, 10, (size, sums, 2), generator=generator).tolist()
    rows = []
    for row in pairs:
        text = "".join(f"{a}+{b}={a + b};" for a, b in row)
        rows.append([ALPHABET.index(c) for c in text[: length + 1]])
    data = torch.tensor(rows)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()
