"""Finds the configuration of the text model in a checkpoint that also takes images.

Such a checkpoint (`...ForConditionalGeneration`) contains a text model of a family that is served.
The key `text_config` describes this text model. Only the text model is served, and requests have no
images. In some checkpoints a position has three dimensions (mrope); for text all three are equal,
so the results are the same as with the family's positions. `directory_files.py` finds the tensors
under the names that such checkpoints use.

This module handles the keys of `config.json`. It reads no files and does not know the fields of
configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.worker.models.config import JsonObject, UnsupportedModel, require

# Keys about images and their places in a text.
_IMAGE_KEYS = frozenset((
    "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "ignore_index",
    "image_grid_pinpoints", "image_seq_length", "image_token_id", "image_token_index",
    "media_placeholder_token_id", "mm_tokens_per_image", "multimodal_projector_bias",
    "projection_hidden_size", "projection_layer_norm_eps", "projector_hidden_act",
    "spatial_merge_size", "use_unified_vision_chunk", "video_placeholder", "video_token_id",
    "vision_config", "vision_end_token_id", "vision_feature_layer",
    "vision_feature_select_strategy", "vision_soft_tokens_per_image", "vision_start_token_id",
    "vision_token_id",
))  # fmt: skip

# Keys about sounds, in checkpoints that also take sounds.
_SOUND_KEYS = frozenset((
    "audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id",
    "eoa_token_id", "eoa_token_index",
))  # fmt: skip

# Keys that apply to the whole checkpoint, also to its text model.
_SHARED_KEYS = frozenset((
    "compression_config", "dtype", "eos_token_id", "quantization", "quantization_config",
    "torch_dtype",
))  # fmt: skip
_HANDLED_KEYS = _SHARED_KEYS | {"architectures", "text_config", "tie_word_embeddings"}
_ROPE_KEYS = frozenset(("rope_parameters", "rope_scaling"))


@dataclass(frozen=True, slots=True)
class TextModel:
    """A kind of text model: its family, and default values for keys that a file may leave out."""

    architecture: str
    defaults: Mapping[str, Any]
    has_mrope: bool = False  # rotary positions have three dimensions
    requires: Mapping[str, Sequence[Any]] = field(
        default_factory=dict
    )  # the values that a key must have
    ignores: frozenset[str] = frozenset()  # keys without effect on text, besides image keys


_LLAMA = TextModel(
    "LlamaForCausalLM",
    {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
)  # fmt: skip
_MISTRAL = TextModel(
    "MistralForCausalLM",
    {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    },
)  # fmt: skip
_MINISTRAL3 = TextModel(
    "Ministral3ForCausalLM",
    {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip
_GEMMA3 = TextModel(
    "Gemma3ForCausalLM",
    {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    },
)  # fmt: skip
_GEMMA3N = TextModel(
    "Gemma3nForCausalLM",
    {
        "vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    ignores=_SOUND_KEYS,
)  # fmt: skip
_GEMMA4_DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GEMMA4 = TextModel("Gemma4ForCausalLM", _GEMMA4_DEFAULTS, ignores=_SOUND_KEYS)
_GEMMA4_UNIFIED = TextModel(
    "Gemma4UnifiedForCausalLM",
    {**_GEMMA4_DEFAULTS, "max_position_embeddings": 262144},
    ignores=_SOUND_KEYS,
)
_QWEN2_VL = TextModel(
    "Qwen2ForCausalLM",
    {
        "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "max_window_layers": 80,
        "rope_theta": 1_000_000.0,
    },
    has_mrope=True,
)  # fmt: skip
_QWEN3_VL = TextModel(
    "Qwen3ForCausalLM",
    {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0,
    },
    has_mrope=True,
    requires={"use_sliding_window": (False, None)},
)  # fmt: skip
_DEEPSEEK_V3 = TextModel(
    "DeepseekV3ForCausalLM",
    {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    },
)  # fmt: skip
_KIMI = {"deepseek_v3": _DEEPSEEK_V3, "kimi_k2": _DEEPSEEK_V3}

_QWEN3_5 = TextModel(
    "Qwen3_5ForCausalLM",
    {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    },
    has_mrope=True,
)  # fmt: skip
_QWEN3_5_MOE = TextModel(
    "Qwen3_5MoeForCausalLM",
    {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    has_mrope=True,
)  # fmt: skip

# The text models that each architecture may have, by `model_type`; the first is the default.
WRAPPERS: Mapping[str, Mapping[str, TextModel]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": _GEMMA3},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": _GEMMA3N},
    "Gemma4ForConditionalGeneration": {"gemma4_text": _GEMMA4},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": _GEMMA4_UNIFIED},
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,  # the spelling of transformers
    "LlavaForConditionalGeneration": {"llama": _LLAMA, "mistral": _MISTRAL},
    "Mistral3ForConditionalGeneration": {"mistral": _MISTRAL, "ministral3": _MINISTRAL3},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": _QWEN2_VL, "qwen2_vl": _QWEN2_VL},
    "Qwen2_5_VLForConditionalGeneration": {
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen2_5_vl": _QWEN2_VL,
    },
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": _QWEN3_VL},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": _QWEN3_5},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": _QWEN3_5_MOE},
}


@dataclass(frozen=True, slots=True)
class TextHalf:
    """The keys of a text model's configuration, and the keys outside of `text_config` that may
    concern text."""

    config: JsonObject
    around: JsonObject


def text_half(config: JsonObject, architecture: str) -> TextHalf:
    """Returns the configuration of the checkpoint's text model, with the keys that the text model's
    family reads. `architecture` is the architecture of the checkpoint.

    For an architecture that takes no images, the result has `config` itself. Raises
    UnsupportedModel for a text model of a kind that is not served.
    """
    models = WRAPPERS.get(architecture)
    if models is None:
        return TextHalf(config, {})
    text = config.get("text_config")
    if text is None:  # older files of Qwen2-VL have no `text_config`
        text = config
    elif not isinstance(text, Mapping):
        raise UnsupportedModel(f"config.json: text_config is no object but {type(text).__name__}")
    model = _model_of(text, models)
    require(text, **model.requires)
    kept = {key: value for key, value in text.items() if key not in _IMAGE_KEYS}
    if model.has_mrope:
        kept |= {key: without_mrope(kept[key]) for key in _ROPE_KEYS & kept.keys()}
    shared = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    # Older files have this key inside `text_config`, newer files outside.
    said = [each.get("tie_word_embeddings") for each in (config, text)]
    ties = [is_tied for is_tied in said if is_tied is not None]
    if ties:
        shared["tie_word_embeddings"] = True if True in ties else ties[0]
    around = {
        key: value
        for key, value in config.items()
        if key not in _IMAGE_KEYS | _HANDLED_KEYS | model.ignores and text.get(key) != value
    }
    return TextHalf(
        {**model.defaults, **kept, **shared, "architectures": [model.architecture]}, around
    )


def _model_of(text: JsonObject, models: Mapping[str, TextModel]) -> TextModel:
    kind = text.get("model_type") or next(iter(models))
    if not isinstance(kind, str) or kind not in models:
        raise UnsupportedModel(
            f"config.json: text_config.model_type {repr(kind)[:80]} is not one of {[*models]}"
        )
    return models[kind]


def without_mrope(rope: Any) -> Any:
    """Returns rotary settings without mrope, so that each token has one position."""
    if not isinstance(rope, Mapping):
        return rope
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value
        for key, value in kept.items()
    }
