"""What a checkpoint says about its model, in our words, or why we cannot serve it.

`ModelConfig` is read from the `config.json` (and `generation_config.json`) of a Hugging Face
checkpoint. Both spellings of rotary settings are understood: `rope_theta` with `rope_scaling`, and
the newer `rope_parameters`. Nothing is skipped silently: a key that is neither read here, nor known
to have no effect on inference, nor switched off (null, false or empty), is refused by its name.

Knows no tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Keys that become fields of ModelConfig as they are, under the field's alias.
_PLAIN_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "attention_bias", "mlp_bias",
)  # fmt: skip

_INTERPRETED_KEYS = (
    "architectures", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "eos_token_id", "torch_dtype", "dtype",
)  # fmt: skip

# Without effect on what the model computes: training, other tasks, text, and defaults of generation
# that are the client's to choose. (`pretraining_tp` only cuts the same matrices into slices;
# `model_type` says again what `architectures` says.)
_HARMLESS_KEYS = (
    "attention_dropout", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_llama_config", "label2id", "length_penalty", "max_length",
    "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
)  # fmt: skip

_KNOWN_KEYS = frozenset((*_PLAIN_KEYS, *_INTERPRETED_KEYS, *_HARMLESS_KEYS))

_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


class UnsupportedModel(ValueError):
    """The checkpoint asks for something we do not compute; the message names it."""


class RopeConfig(BaseModel):
    """How positions become angles. Only the fields of the type are set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["default", "linear", "llama3"]
    rope_theta: PositiveFloat  # base of the wavelengths
    factor: PositiveFloat | None = None  # by how much the context was stretched
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None  # before stretching, tokens

    @model_validator(mode="after")
    def _check_fields_of_type(self) -> Self:
        for key in _ROPE_KEYS[self.rope_type]:
            if getattr(self, key) is None:
                raise ValueError(f"{key} is missing for rope_type {self.rope_type!r}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor ({low}) is not below high_freq_factor ({high})")
        return self


class ModelConfig(BaseModel):
    """Everything that decides what a model of the Llama family computes; aliases are HF's keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str  # class name in the checkpoint; the registry of families knows it
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    n_layers: PositiveInt = Field(alias="num_hidden_layers")
    n_heads: PositiveInt = Field(alias="num_attention_heads")
    n_kv_heads: PositiveInt = Field(alias="num_key_value_heads")
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt  # longest sequence, tokens
    rms_norm_eps: PositiveFloat
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...]  # tokens that end an output
    checkpoint_dtype: Literal["float32", "bfloat16", "float16"]  # element type of the files

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.n_heads}) is not a multiple of "
                f"num_key_value_heads ({self.n_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd; rotary embedding turns pairs")
        return self

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Reads the configuration of the checkpoint in `directory`; raises UnsupportedModel."""
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return cls.from_json(_read_json(directory / "config.json"), generation)

    @classmethod
    def from_json(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Self:
        """The same from the contents of `config.json` and `generation_config.json`."""
        _refuse_unknown_keys(config)
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(
                f"config.json: hidden_act {config['hidden_act']!r} is not 'silu'"
            )
        fields = {key: config[key] for key in _PLAIN_KEYS if config.get(key) is not None}
        fields.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        if "head_dim" not in fields:
            fields["head_dim"] = _default_head_dim(config)
        fields["architecture"] = _architecture(config)
        fields["rope"] = _rope(config)
        fields["eos_token_ids"] = _eos_token_ids(config, generation)
        fields["checkpoint_dtype"] = _checkpoint_dtype(config)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise UnsupportedModel(f"config.json: {_summary(error)}") from error

    def resolve_dtype(self, dtype: str) -> torch.dtype:
        """The element type to compute in: "float32", "bfloat16", or "auto" for the checkpoint's.

        A float16 checkpoint runs in float32 under "auto": bfloat16 would drop bits of its weights,
        and processors compute float16 slowly.
        """
        if dtype == "auto":
            return _DTYPES.get(self.checkpoint_dtype, torch.float32)
        if dtype not in _DTYPES:
            raise UnsupportedModel(f"dtype {dtype!r} is not one of {['auto', *_DTYPES]}")
        return _DTYPES[dtype]

    def fingerprint(self, dtype: torch.dtype) -> str:
        """SHA-256 over what is computed and in which element type, however the file spells it."""
        meaning = self.model_dump(mode="json", exclude={"checkpoint_dtype"})
        meaning["dtype"] = str(dtype)
        canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        contents = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UnsupportedModel(f"{path} does not exist") from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return contents


def _refuse_unknown_keys(config: Mapping[str, Any]) -> None:
    unknown = {
        key: value
        for key, value in config.items()
        # A leading underscore marks bookkeeping of the program that wrote the file.
        if value and key not in _KNOWN_KEYS and not key.startswith("_")
    }
    if unknown:
        raise UnsupportedModel(f"config.json has options that are not supported: {unknown}")


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnsupportedModel(f"config.json: architectures {architectures!r} names no single one")
    return str(architectures[0])


def _default_head_dim(config: Mapping[str, Any]) -> int | None:
    hidden_size, n_heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden_size, int) or not isinstance(n_heads, int) or n_heads < 1:
        return None  # the validation of these fields has the better message
    if hidden_size % n_heads:
        raise UnsupportedModel(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({n_heads}) and there is no head_dim"
        )
    return hidden_size // n_heads


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of either spelling as fields of RopeConfig."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new:
        raise UnsupportedModel("config.json has both rope_scaling and rope_parameters")
    given = dict(new or old or {})
    rope_type = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if rope_type not in _ROPE_KEYS:
        raise UnsupportedModel(
            f"config.json: rope_type {rope_type!r} is not one of {[*_ROPE_KEYS]}"
        )
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial!r} is not supported")
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    # Some files carry settings of types that they do not use; these are what other programs skip.
    unknown = set(given) - {key for keys in _ROPE_KEYS.values() for key in keys}
    if unknown:
        raise UnsupportedModel(f"config.json: unknown rotary settings {sorted(unknown)}")
    used = {key: given.get(key) for key in _ROPE_KEYS[rope_type]}
    return {"rope_type": rope_type, "rope_theta": theta, **used}


def _eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[Any, ...] | Any:
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """What the file calls `dtype` or, before, `torch_dtype`; float32 when it says nothing."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _summary(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, detail['loc'])) or 'model'}: {detail['msg']}"
        for detail in error.errors()
    )
