"""The models of `benchmarks.gpu`, at the size of a data-centre GPU and at one that a laptop's CPU bears.

Weights are random and nothing is downloaded: memory and time do not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo import KIND, UNet

Loss = Callable[[Any], Tensor]
IMAGE_CLASSES: Any = {i: str(i) for i in range(1000)}


@dataclass
class Training:
    """A model in train mode, a batch, and the loss of what the model returns.

    ``chains`` are its lists of layers that follow each other, ``blocks`` those with something in between.
    ``least``: about the share of the memory without limit, above what is resident, that no plan can do
    without (large: logits of a large vocabulary, and their gradient).
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    loss: Loss
    chains: tuple[Any, ...] = ()
    blocks: tuple[Any, ...] = ()
    least: float = 0.3

    @property
    def layers(self) -> int:
        """How many of them can be checkpointed one by one."""
        return sum(map(len, (*self.chains, *self.blocks)))

    @contextmanager
    def checkpointed(self, segment: int) -> Iterator[None]:
        """Inside, each ``segment`` layers in a chain are one of `torch.utils.checkpoint`'s."""
        before = [list(layers) for layers in (*self.chains, *self.blocks)]
        for layers in (*self.chains, *self.blocks):
            size = segment if layers in self.chains else 1
            parts = [list(layers)[i : i + size] for i in range(0, len(layers), size)]
            _put(layers, [Segment(part) for part in parts])
        try:
            yield
        finally:
            for layers, old in zip((*self.chains, *self.blocks), before, strict=True):
                _put(layers, old)


class Segment(nn.Module):
    """Some layers as one, of which only the input is saved; otherwise it passes for the first of them."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(layers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside")[0], name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the last layer returns."""
        return checkpoint(self._run, x, *args, use_reentrant=False, **kwargs)

    def _run(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self.inside:
            x = layer(x[0] if isinstance(x, tuple) else x, *args, **kwargs)
        return x


def _put(layers: Any, modules: list[nn.Module]) -> None:
    """Make ``modules`` the content of a list of modules, in place."""
    layers._modules.clear()
    layers._modules.update({str(n): module for n, module in enumerate(modules)})


def sqrt_of(layers: int) -> int:
    """The length of a segment that Chen et al. 2016 (arXiv:1604.06174) take.

    >>> sqrt_of(16), sqrt_of(28)
    (4, 5)
    """
    return max(1, round(math.sqrt(layers)))


def llama_1b(large: bool) -> Training:
    """Of Llama-3.2-1B's sizes: 4 x 2,048 tokens."""
    sizes: Any = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    }  # fmt: skip
    model = hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False, **(sizes if large else _SMALL)))
    return _text(model, model.model.layers, large, least=0.65)


def qwen_2b(large: bool) -> Training:
    """Of Qwen3-1.7B's sizes: 4 x 2,048 tokens."""
    sizes: Any = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    }  # fmt: skip
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(use_cache=False, **(sizes if large else _SMALL)))
    return _text(model, model.model.layers, large, least=0.5)


def gpt2_xl(large: bool) -> Training:
    """Of GPT-2 XL's sizes, dropout 0.1: 8 x 1,024 tokens."""
    sizes = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
    small = {
        "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128,
        "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config: Any = sizes if large else small
    model = hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False, **config))
    return _text(model, model.transformer.h, large, batch=8, length=1024, least=0.25)


def resnet50(large: bool) -> Training:
    """ResNet-50 on 128 images of 224 x 224."""
    config = hf.ResNetConfig(id2label=IMAGE_CLASSES, problem_type=KIND)
    if not large:
        config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 48, 64], depths=[2, 2, 2, 2],
                                 id2label=IMAGE_CLASSES, problem_type=KIND)  # fmt: skip
    model = hf.ResNetForImageClassification(config)
    batch, size = (128, 224) if large else (8, 64)
    inputs = {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 1000, (batch,))}
    stages = tuple(stage.layers for stage in model.resnet.encoder.stages)
    return Training(model, inputs, lambda out: out.loss, chains=stages, least=0.18)


def unet(large: bool) -> Training:
    """A U-Net of five levels on 16 images of 512 x 512."""
    model = UNet(width=64, depth=4) if large else UNet()
    batch, size = (16, 512) if large else (4, 64)
    image = torch.randn(batch, 3, size, size)
    label = (image.sum(1) > 0).long()
    return Training(
        model,
        {"image": image},
        lambda logits: F.cross_entropy(logits.float(), label),
        blocks=(model.down, model.join),
        least=0.38,
    )


MODELS: dict[str, Callable[[bool], Training]] = {
    "llama-1b": llama_1b,
    "qwen-1.7b": qwen_2b,
    "gpt2-xl": gpt2_xl,
    "resnet-50": resnet50,
    "unet": unet,
}

_SMALL: Any = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


def _text(
    model: Any, layers: nn.ModuleList, large: bool, batch: int = 4, length: int = 2048, *, least: float
) -> Training:
    model.loss_type = "ForCausalLM"  # left to be found out it is warned of, and the graph breaks there
    batch, length = (batch, length) if large else (4, 128)
    tokens = torch.randint(0, 256, (batch, length))
    return Training(
        model, {"input_ids": tokens, "labels": tokens}, lambda out: out.loss, (layers,), least=least
    )


def built(name: str, device: torch.device, *, large: bool) -> Training:
    """One of `MODELS` on ``device``: in bfloat16 where it is large, as it is trained on a GPU."""
    torch.manual_seed(20)
    with device:
        training = MODELS[name](large)
    if large:
        training.model.to(torch.bfloat16)
        floats = {k: v.to(torch.bfloat16) for k, v in training.inputs.items() if v.is_floating_point()}
        training.inputs = {**training.inputs, **floats}
    training.model.train()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the weights in float32: other processes need it
    return training
