"""Many of transformers' own model classes, each small: text, vision, audio, both, experts, state space.

A row names the config and what makes it small; the kind says what the model is asked to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.zoo import CLASSES, KIND, SEED, Case, case_of, own_loss

VOCABULARY, ROWS, LENGTH = 128, 2, 32
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GROUPED = BASE | {"num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "use_cache": False,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": None, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
PATCHES = BASE | {"image_size": 32, "patch_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SOUND: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2), "vocab_size": VOCABULARY,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3,
    "classifier_proj_size": 32, "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip
STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}

Rows = dict[str, tuple[str, dict[str, Any]]]

CAUSAL: Rows = {
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED),
    "mistral": ("MistralConfig", GROUPED),
    "gemma2": ("Gemma2Config", GROUPED),
    "phi": ("PhiConfig", BASE | {"use_cache": False}),
    "phi3": ("Phi3Config", GROUPED),
    "olmo2": ("Olmo2Config", GROUPED),
    "stablelm": ("StableLmConfig", GROUPED),
    "starcoder2": ("Starcoder2Config", GROUPED),
    "cohere": ("CohereConfig", GROUPED),
    "granite": ("GraniteConfig", GROUPED),
    "smollm3": ("SmolLM3Config", GROUPED),
    "falcon": ("FalconConfig", BASE | {"use_cache": False}),
    "gpt_neox": ("GPTNeoXConfig", BASE | {"use_cache": False}),
    "gptj": ("GPTJConfig", GPT | {"rotary_dim": 16}),
    "gpt_bigcode": ("GPTBigCodeConfig", GPT),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "use_cache": False},
    ),
    "opt": ("OPTConfig", BASE | {"ffn_dim": 128, "word_embed_proj_dim": 64, "use_cache": False}),
    "qwen2_moe": ("Qwen2MoeConfig", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", GROUPED | EXPERTS),
    "olmoe": ("OlmoeConfig", GROUPED | EXPERTS),
    "granitemoe": ("GraniteMoeConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "use_cache": False,
        },
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "use_cache": False,
        },
    ),
}
MASKED: Rows = {
    "roberta": ("RobertaConfig", BASE),
    "electra": ("ElectraConfig", BASE | {"embedding_size": 64}),
    "albert": ("AlbertConfig", BASE | {"embedding_size": 32}),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    ),
    "mpnet": ("MPNetConfig", BASE),
    "deberta_v2": ("DebertaV2Config", BASE | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "modernbert": ("ModernBertConfig", BASE | {"cls_token_id": 1, "sep_token_id": 2}),
    "fnet": ("FNetConfig", BASE),
}
PAIRED: Rows = {
    "t5": ("T5Config", T5),
    "pegasus": ("PegasusConfig", PAIR),
    "mbart": ("MBartConfig", PAIR),
    "m2m_100": ("M2M100Config", PAIR),
    "blenderbot_small": ("BlenderbotSmallConfig", PAIR),
}
SEEING: Rows = {
    "vit_msn": ("ViTMSNConfig", PATCHES),
    "beit": ("BeitConfig", PATCHES),
    "dinov2": ("Dinov2Config", PATCHES),
    "swin": (
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    "convnext": ("ConvNextConfig", STAGES),
    "convnextv2": ("ConvNextV2Config", STAGES),
    "resnet": ("ResNetConfig", STAGES | {"embedding_size": 16}),
    "poolformer": ("PoolFormerConfig", STAGES),
    "segformer": (
        "SegformerConfig",
        {
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 32,
        },
    ),
}
HEARING: Rows = {
    "wav2vec2": ("Wav2Vec2Config", SOUND),
    "hubert": ("HubertConfig", SOUND),
    "wavlm": ("WavLMConfig", SOUND),
}


def _config(row: tuple[str, dict[str, Any]], **more: Any) -> Any:
    name, settings = row
    return getattr(hf, name)(**settings, **more)


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH))


def _causal(name: str) -> Case:
    torch.manual_seed(SEED)
    model = hf.AutoModelForCausalLM.from_config(_config(CAUSAL[name]))
    tokens = _tokens()
    return case_of(name, model, own_loss, input_ids=tokens, labels=tokens)


def _masked(name: str) -> Case:
    torch.manual_seed(SEED)
    model = hf.AutoModelForMaskedLM.from_config(_config(MASKED[name]))
    tokens = _tokens()
    return case_of(name, model, own_loss, input_ids=tokens, labels=tokens)


def _paired(name: str) -> Case:
    torch.manual_seed(SEED)
    model = hf.AutoModelForSeq2SeqLM.from_config(_config(PAIRED[name]))
    return case_of(name, model, own_loss, input_ids=_tokens(), labels=_tokens())


def _seeing(name: str) -> Case:
    torch.manual_seed(SEED)
    config = _config(SEEING[name], id2label=CLASSES, problem_type=KIND)
    model = hf.AutoModelForImageClassification.from_config(config)
    labels = torch.randint(0, len(CLASSES), (ROWS,))
    return case_of(name, model, own_loss, pixel_values=torch.randn(ROWS, 3, 32, 32), labels=labels)


def wav2vec2() -> Case:
    """As it is trained: layers are left out, and parts of the sound covered, at random; several graphs."""
    torch.manual_seed(SEED)
    config = _config(HEARING["wav2vec2"], num_labels=len(CLASSES))
    config.update({"apply_spec_augment": True, "mask_time_length": 2, "layerdrop": 0.1})
    model = hf.AutoModelForAudioClassification.from_config(config)
    sound, labels = torch.randn(ROWS, 4800), torch.randint(0, len(CLASSES), (ROWS,))
    return case_of("wav2vec2", model, own_loss, input_values=sound, labels=labels)


def _hearing(name: str) -> Case:
    torch.manual_seed(SEED)
    config = _config(HEARING[name], num_labels=len(CLASSES))
    model = hf.AutoModelForAudioClassification.from_config(config)
    model.freeze_feature_encoder()  # else it sets a tensor's `requires_grad`, which breaks the graph
    sound, labels = torch.randn(ROWS, 1600), torch.randint(0, len(CLASSES), (ROWS,))
    with torch.no_grad():
        model(sound)  # transformers installs hooks in the first call, under a lock, which breaks the graph
    return case_of(name, model, own_loss, input_values=sound, labels=labels)


def clip() -> Case:
    """Two towers, and a loss that compares all pictures with all texts."""
    torch.manual_seed(SEED)
    config = hf.CLIPConfig(text_config=BASE, vision_config=PATCHES, projection_dim=32)
    model = hf.CLIPModel(config)
    images = torch.randn(ROWS, 3, 32, 32)
    return case_of("clip", model, _contrast, input_ids=_tokens(), pixel_values=images)


def siglip() -> Case:
    """The same, compared by a sigmoid."""
    torch.manual_seed(SEED)
    config = hf.SiglipConfig(text_config=BASE, vision_config=PATCHES)
    images = torch.randn(ROWS, 3, 32, 32)
    return case_of("siglip", hf.SiglipModel(config), _contrast, input_ids=_tokens(), pixel_values=images)


def vilt() -> Case:
    """One transformer over words and patches."""
    torch.manual_seed(SEED)
    model = hf.ViltModel(hf.ViltConfig(**PATCHES))
    images = torch.randn(ROWS, 3, 32, 32)
    return case_of("vilt", model, _square, input_ids=_tokens(), pixel_values=images)


def _contrast(output: Any) -> Tensor:
    logits: Tensor = output.logits_per_text
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def _square(output: Any) -> Tensor:
    loss: Tensor = output.last_hidden_state.square().mean() + output.pooler_output.square().mean()
    return loss


WIDE: dict[str, Callable[[], Case]] = {
    **{name: partial(_causal, name) for name in CAUSAL},
    **{name: partial(_masked, name) for name in MASKED},
    **{name: partial(_paired, name) for name in PAIRED},
    **{name: partial(_seeing, name) for name in SEEING},
    **{name: partial(_hearing, name) for name in HEARING},
    "clip": clip,
    "siglip": siglip,
}
SEVERAL: dict[str, Callable[[], Case]] = {"vilt": vilt}  # graphs: Dynamo breaks them
