"""Models of the corpus that transformers defines: configurations at published sizes, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.corpus_far import FAR
from benchmarks.corpus_nets import NETS
from benchmarks.corpus_trace import A100, CPU, Case, pose
from benchmarks.models import llama8
from rematc import compat
from rematc.problem import Problem

CLASSES: Any = {i: str(i) for i in range(1000)}
KIND: Any = "single_label_classification"  # left to find out, it would be read off the labels


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _text(model: nn.Module, batch: int, length: int) -> Case:
    tokens = torch.randint(0, 100, (batch, length))
    return Case(model.train(), {"input_ids": tokens, "labels": tokens}, _own_loss)


def _images(model: nn.Module, batch: int) -> Case:
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    return Case(model.train(), {"pixel_values": images, "labels": labels}, _own_loss)


@contextmanager
def _bfloat16() -> Iterator[None]:
    """Models made inside have their parameters in bfloat16; without memory they can't be cast later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gpt2(layers: int, width: int = 768, batch: int = 8) -> Case:
    """GPT-2 at 1024 tokens; dropout 0.1 in the embedding, the attention and the residuals."""
    config = hf.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = hf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it logs that this is its default, which breaks the graph
    return _text(model, batch, 1024)


def llama(
    layers: int, width: int, heads: tuple[int, int], inner: int, batch: int, vocabulary: int = 32_000
) -> Case:
    """Llama in bfloat16 at 2048 tokens; ``heads`` of the queries, and of the keys and values."""
    config = hf.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], intermediate_size=inner, vocab_size=vocabulary,
        max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with _bfloat16():
        return _text(hf.LlamaForCausalLM(config), batch, 2048)


def bert() -> Case:
    """BERT-base as a masked language model, 32 x 512 tokens; dropout 0.1."""
    config = hf.BertConfig()
    tokens = torch.randint(0, 100, (32, 512))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    return Case(hf.BertForMaskedLM(config).train(), inputs, _own_loss)


def vit() -> Case:
    """ViT-base, 64 images of 224 x 224 in patches of 16; dropout 0.1."""
    config = hf.ViTConfig(
        id2label=CLASSES, problem_type=KIND, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
    )
    with compat.real_tensors():  # it reads numbers off tensors when it is made
        model = hf.ViTForImageClassification(config)
    return _images(model, 64)


def resnet50() -> Case:
    """ResNet-50, 64 images of 224 x 224; BatchNorm in train mode."""
    config = hf.ResNetConfig(id2label=CLASSES, problem_type=KIND)
    return _images(hf.ResNetForImageClassification(config), 64)


def convnext() -> Case:
    """ConvNeXt-tiny, 64 images of 224 x 224; no BatchNorm, no dropout."""
    config = hf.ConvNextConfig(id2label=CLASSES, problem_type=KIND)
    with compat.real_tensors():  # as with ViT
        model = hf.ConvNextForImageClassification(config)
    return _images(model, 64)


def t5() -> Case:
    """T5-base, 8 x 512 tokens to 8 x 512: encoder, decoder, cross-attention, position biases; dropout 0.1."""
    config = hf.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False)
    config.decoder_start_token_id = 0
    return _text(hf.T5ForConditionalGeneration(config), 8, 512)


def bart() -> Case:
    """BART-base, 16 x 1024 tokens to 16 x 1024; dropout 0.1."""
    config = hf.BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    return _text(hf.BartForConditionalGeneration(config), 16, 1024)


def moe() -> Case:
    """Mixtral with 8 layers of width 1024, 8 experts, 2 for each of 4 x 2048 tokens; bfloat16."""
    config = hf.MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, use_cache=False, output_router_logits=False,
    )  # fmt: skip
    with _bfloat16():
        return _text(hf.MixtralForCausalLM(config), 4, 2048)


def mamba() -> Case:
    """Mamba-2 with 12 layers of width 768, 8 x 1024 tokens in chunks of 256."""
    config = hf.Mamba2Config(
        hidden_size=768, num_hidden_layers=12, num_heads=24, head_dim=64, n_groups=1, use_cache=False,
        vocab_size=50_288,
    )  # fmt: skip
    return _text(hf.Mamba2ForCausalLM(config), 8, 1024)


def clip() -> Case:
    """CLIP with ViT-B/32, 256 images of 224 x 224 and as many texts of 77 tokens: two towers, one loss."""
    batch = 256
    texts, images = torch.randint(0, 100, (batch, 77)), torch.randn(batch, 3, 224, 224)
    pairs = torch.arange(batch)

    def loss(output: Any) -> Tensor:
        logits: Tensor = output.logits_per_text
        return F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)

    inputs = {"input_ids": texts, "attention_mask": torch.ones_like(texts), "pixel_values": images}
    return Case(hf.CLIPModel(hf.CLIPConfig()).train(), inputs, loss)


def efficientnet() -> Case:
    """EfficientNet-B0, 64 images of 224 x 224."""
    config = hf.EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, image_size=224,
        id2label=CLASSES, problem_type=KIND,
    )  # fmt: skip
    return _images(hf.EfficientNetForImageClassification(config), 64)


def whisper() -> Case:
    """Whisper-small, 8 spectra of 30 seconds to 448 tokens each."""
    config = hf.WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 100, (8, 448))
    inputs = {"input_features": torch.randn(8, 80, 3000), "labels": tokens}
    return Case(hf.WhisperForConditionalGeneration(config).train(), inputs, _own_loss)


def small_llama() -> Case:
    """The Llama of the benchmarks."""
    model, inputs = llama8()
    return Case(model, inputs, _own_loss)


MODELS: dict[str, Callable[[], Case]] = {
    **NETS,
    **FAR,
    "gpt2_2": lambda: gpt2(2),
    "gpt2_4": lambda: gpt2(4),
    "gpt2_8": lambda: gpt2(8),
    "gpt2_12": lambda: gpt2(12),
    "gpt2_24": lambda: gpt2(24, width=1024),
    "llama8": small_llama,
    "llama_8": lambda: llama(8, 2048, (32, 8), 8192, batch=4),
    "llama_16": lambda: llama(16, 2048, (32, 8), 8192, batch=4, vocabulary=128_256),
    "llama_32": lambda: llama(32, 4096, (32, 32), 11_008, batch=4),
    "llama_80": lambda: llama(80, 8192, (64, 8), 28_672, batch=8),
    "bert": bert,
    "vit": vit,
    "resnet50": resnet50,
    "convnext": convnext,
    "t5": t5,
    "bart": bart,
    "moe": moe,
    "mamba": mamba,
    "clip": clip,
    "efficientnet": efficientnet,
    "whisper": whisper,
}


def model_problem(name: str) -> Problem:
    """The problem of the model called ``name``, for a GPU; "llama8" is for the CPU, as in the benchmarks."""
    return pose(MODELS[name], CPU if name == "llama8" else A100)
