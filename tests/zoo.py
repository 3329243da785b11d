"""Small models of many kinds, each with a batch and a loss: the same bits at every build.

They are small in parameters and large in activations, as training is where memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models

SEED = 20
CLASSES: Any = {i: str(i) for i in range(10)}
KIND = "single_label_classification"  # left to find out, the second step would be compiled anew


@dataclass(frozen=True)
class Case:
    """A model in train mode, the arguments of its forward pass, and the loss of its output."""

    name: str
    model: nn.Module
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]


def step(case: Case, model: Callable[..., Any] | None = None) -> Tensor:
    """One forward and backward pass of ``case`` (or of ``model``, its compiled self); the loss."""
    run = case.model if model is None else model  # `or` would ask a compiled model for its len()
    loss = case.loss(run(**case.inputs))
    loss.backward()
    return loss.detach()


def own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def case_of(name: str, model: nn.Module, loss: Callable[[Any], Tensor], **inputs: Tensor) -> Case:
    return Case(name, model.train(), inputs, loss)


def text_case(name: str, model: nn.Module, batch: int, length: int) -> Case:
    tokens = torch.randint(0, 100, (batch, length))
    return case_of(name, model, own_loss, input_ids=tokens, labels=tokens)


def gpt2() -> Case:
    """GPT-2 with 3 layers; dropout 0.1 in the embedding, the attention and the residuals."""
    torch.manual_seed(SEED)
    config = hf.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, n_positions=128, vocab_size=128,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = hf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it logs that this is its default, which breaks the graph
    return text_case("gpt2", model, 4, 128)


def bert() -> Case:
    """BERT with 3 layers, as a masked language model; dropout 0.1."""
    torch.manual_seed(SEED)
    config = hf.BertConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=128, vocab_size=128,
    )  # fmt: skip
    tokens = torch.randint(0, 100, (4, 128))
    hidden = torch.rand(tokens.shape) < 0.15
    return case_of(
        "bert", hf.BertForMaskedLM(config), own_loss,
        input_ids=tokens.masked_fill(hidden, 101),
        attention_mask=torch.ones_like(tokens),
        labels=tokens.masked_fill(~hidden, -100),
    )  # fmt: skip


def vit() -> Case:
    """ViT with 3 layers on images of 32 x 32; dropout 0.1."""
    torch.manual_seed(SEED)
    config = hf.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        image_size=32, patch_size=4, id2label=CLASSES, problem_type=KIND,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return image_case("vit", hf.ViTForImageClassification(config), 8)


def resnet50() -> Case:
    """ResNet-50 at its full depth and a quarter of its first width; BatchNorm in train mode."""
    torch.manual_seed(SEED)
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 48, 64], depths=[3, 4, 6, 3],
        layer_type="bottleneck", id2label=CLASSES, problem_type=KIND,
    )  # fmt: skip
    return image_case("resnet50", hf.ResNetForImageClassification(config), 16, size=64)


def image_case(name: str, model: nn.Module, batch: int, size: int = 32) -> Case:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    return case_of(name, model, own_loss, pixel_values=images, labels=labels)


def llama() -> Case:
    """Llama with 3 layers and grouped keys."""
    torch.manual_seed(SEED)
    config = hf.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=176, vocab_size=128, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return text_case("llama", hf.LlamaForCausalLM(config), 4, 128)


def llama8() -> Case:
    """The Llama of the benchmarks: 8 layers, 4 x 256 tokens, 189.8 MB in eager."""
    model, inputs = models.llama8(SEED)
    return case_of("llama8", model, own_loss, **inputs)


class _Double(nn.Sequential):
    """Two convolutions with BatchNorm, dropout in between."""

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__(
            nn.Conv2d(wide_in, wide_out, 3, padding=1, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(wide_out, wide_out, 3, padding=1, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Down ``depth`` times and up again, each level joined to its peer by a skip connection."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        pairs = list(pairwise(widths))
        self.first = _Double(3, width)
        self.down = nn.ModuleList(_Double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(_Double(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Logits (batch, 2, height, width) of an image (batch, 3, height, width)."""
        x, skips = self.first(image), []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def unet() -> Case:
    """A U-Net of three levels with BatchNorm, dropout and transposed convolutions."""
    torch.manual_seed(SEED)
    model, image = UNet(), torch.randn(4, 3, 64, 64)
    label = (image.sum(1) > 0).long()
    return case_of("unet", model, lambda logits: F.cross_entropy(logits, label), image=image)


def mlp() -> Case:
    """Six linear layers with GELU and LayerNorm."""
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    x, label = torch.randn(512, 64), torch.randint(0, 10, (512,))
    return case_of("mlp", model, lambda logits: F.cross_entropy(logits, label), input=x)


ZOO: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet50": resnet50,
    "llama": llama,
    "unet": unet,
    "mlp": mlp,
}
