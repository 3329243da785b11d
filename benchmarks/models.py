"""The models that are measured, and their ways to run a step: nothing to download."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rematc.measure import measure
from rematc.options import parse_budget

if TYPE_CHECKING:
    from rematc.backend import Backend

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


def llama8(seed: int = 20) -> tuple[nn.Module, dict[str, Tensor]]:
    """The Llama that figures in the docs are about, and its batch: 8 layers, 4 x 256 tokens.

    In eager a step takes 189.8 MB above its parameters. The same seed gives the same bits.
    """
    import transformers as hf  # takes seconds, and the GPT does without

    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=688, vocab_size=1000, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).train()
    tokens = torch.randint(0, 100, (4, 256))
    return model, {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Variant:
    """A model and one way to run its step; ``loss()`` is its forward pass.

    ``backend`` is rematc's where it is one, and then knows the budget and what it predicted.
    """

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]
    backend: Backend | None = None

    def clear(self) -> None:
        """Drop the gradients: a step is measured from there, and makes them anew."""
        self.model.zero_grad(set_to_none=True)

    def step(self) -> Tensor:
        """One forward and backward pass; the loss."""
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each parameter, as the last step left it."""
        return [p.grad for p in self.model.parameters()]

    def measured_bytes(self) -> int:
        """The peak of one step above what is resident, by the allocator."""
        self.clear()
        peak = measure(self.step, device="cpu").peak_bytes
        self.clear()
        return peak

    @property
    def budget_bytes(self) -> int | None:
        """The budget given to rematc; None is no limit, or no rematc."""
        return None if self.backend is None else parse_budget(self.backend.options.budget)

    @property
    def predicted_bytes(self) -> int | None:
        """The peak that the plan says, resident included; None without rematc."""
        return self.backend.plans[-1].peak_bytes if self.backend and self.backend.plans else None


def resident_bytes(model: nn.Module, inputs: Iterable[Any]) -> int:
    """Bytes of parameters, buffers and inputs, each storage once: there before the step and after it."""
    tensors = [*model.parameters(), *model.buffers(), *(t for t in inputs if isinstance(t, Tensor))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def largest_difference(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> float:
    """The largest absolute difference of any element; infinite where one has none or is not a number.

    >>> largest_difference([torch.ones(2), None], [torch.zeros(2), None])
    1.0
    """
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            worst = worst if a is b else float("inf")
        elif not torch.equal(a, b):
            off = (a - b).abs().max().item()
            worst = max(worst, off) if off == off else float("inf")
    return worst
