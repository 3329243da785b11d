"""Models of further kinds for what is compiled: encoder-decoder, mixture of experts, state space, audio."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf

from tests.zoo import CLASSES, KIND, SEED, ZOO, Case, case_of, image_case, own_loss, text_case

_SMALL = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128}
_SMALL |= {"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}


def bart() -> Case:
    """BART: an encoder and a decoder with cross-attention, two layers each; dropout 0.1."""
    torch.manual_seed(SEED)
    config = hf.BartConfig(vocab_size=128, max_position_embeddings=128, use_cache=False, **_SMALL)
    return text_case("bart", hf.BartForConditionalGeneration(config), 4, 64)


def mixtral() -> Case:
    """A mixture of experts: 4 experts, 2 for each token."""
    torch.manual_seed(SEED)
    config = hf.MixtralConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, vocab_size=128,
        max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return text_case("mixtral", hf.MixtralForCausalLM(config), 4, 64)


def mamba() -> Case:
    """A state-space model; the scan over time is unrolled, as transformers does without its kernels."""
    torch.manual_seed(SEED)
    config = hf.MambaConfig(
        hidden_size=64, num_hidden_layers=2, state_size=8, vocab_size=128, use_cache=False
    )
    return text_case("mamba", hf.MambaForCausalLM(config), 2, 32)


def regnet() -> Case:
    """RegNet: grouped convolutions, squeeze and excitation; BatchNorm in train mode."""
    torch.manual_seed(SEED)
    config = hf.RegNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1], groups_width=8,
        id2label=CLASSES, problem_type=KIND,
    )  # fmt: skip
    return image_case("regnet", hf.RegNetForImageClassification(config), 4, size=64)


def whisper() -> Case:
    """Whisper: convolutions over a spectrogram, then an encoder and a decoder."""
    torch.manual_seed(SEED)
    config = hf.WhisperConfig(
        vocab_size=128, max_source_positions=64, max_target_positions=32, num_mel_bins=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False, **_SMALL,
    )  # fmt: skip
    labels = torch.randint(4, 100, (2, 32))
    model = hf.WhisperForConditionalGeneration(config)
    return case_of("whisper", model, own_loss, input_features=torch.randn(2, 16, 128), labels=labels)


ALL: dict[str, Callable[[], Case]] = {
    **ZOO,
    "bart": bart,
    "mixtral": mixtral,
    "mamba": mamba,
    "regnet": regnet,
    "whisper": whisper,
}
