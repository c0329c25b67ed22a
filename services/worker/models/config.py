"""What a checkpoint says about its model, in our words, or why we cannot serve it.

A family's configuration is a subclass of `ModelConfig`, beside its model. Its fields are the keys
of `config.json` that it reads, under their alias; `ignored_keys` are those that have no effect on
what this family computes; what takes more than a look at one key is done in its `read`. Nothing is
skipped silently: a key that is none of these and not switched off (null, false or empty) is refused
by its name. Rotary settings are understood in both spellings: `rope_theta` with `rope_scaling`, and
the newer `rope_parameters`.

Knows no tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

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

JsonObject = Mapping[str, Any]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Without effect on what any model computes: training, other tasks, text, and defaults of generation
# that are the client's to choose. (`model_type` says again what `architectures` says.)
_HARMLESS_KEYS = frozenset((
    "attention_dropout", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "label2id", "length_penalty", "max_length",
    "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
))  # fmt: skip

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
    """What every family has, and how its `config.json` is read; a field's alias is its key there.

    A derived field has no key of its own: `read` makes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    derived: ClassVar[frozenset[str]] = frozenset(
        ("architecture", "n_kv_heads", "head_dim", "eos_token_ids", "checkpoint_dtype")
    )
    read_keys: ClassVar[frozenset[str]] = frozenset(  # that `read` looks at for derived fields
        ("architectures", "eos_token_id", "torch_dtype", "dtype")
    )
    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    architecture: str  # class name in the checkpoint; the registry of families knows it
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    n_layers: PositiveInt = Field(alias="num_hidden_layers")
    n_heads: PositiveInt = Field(alias="num_attention_heads")
    n_kv_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt  # longest sequence, tokens
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...]  # tokens that end an output
    checkpoint_dtype: Literal["float32", "bfloat16", "float16"]  # element type of the files

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.n_heads}) is not a multiple of "
                f"num_key_value_heads ({self.n_kv_heads})"
            )
        return self

    @property
    def layer_windows(self) -> Sequence[int | None]:
        """Of each layer, how many keys a query sees, its own among them; None: all before it."""
        return (None,) * self.n_layers

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Reads the configuration of the checkpoint in `directory`; raises UnsupportedModel."""
        return cls.from_json(*read_json_files(directory))

    @classmethod
    def from_json(cls, config: JsonObject, generation: JsonObject) -> Self:
        """The same from the contents of `config.json` and `generation_config.json`."""
        plain_keys = {
            field.alias or name: name
            for name, field in cls.model_fields.items()
            if name not in cls.derived
        }
        _refuse_unknown_keys(config, {*plain_keys, *cls.read_keys, *cls.ignored_keys})
        fields = {key: config[key] for key in plain_keys if config.get(key) is not None}
        fields |= cls.read(config)
        fields["architecture"] = architecture_of(config)
        fields["eos_token_ids"] = _eos_token_ids(config, generation)
        fields["checkpoint_dtype"] = _checkpoint_dtype(config)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise UnsupportedModel(f"config.json: {_summary(error)}") from error

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        """Derived fields; here those of a model with as many K/V heads as query heads.

        Families extend it, and raise UnsupportedModel for what they do not compute.
        """
        hidden_size = config.get(cls.model_fields["hidden_size"].alias or "hidden_size")
        n_heads = config.get(cls.model_fields["n_heads"].alias or "n_heads")
        return {"n_kv_heads": n_heads, "head_dim": _default_head_dim(hidden_size, n_heads)}

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


class RotaryConfig(ModelConfig):
    """Of the many that descend from Llama: grouped queries, rotary positions, a gated MLP."""

    derived = ModelConfig.derived | {"rope"}
    read_keys = ModelConfig.read_keys | {
        "num_key_value_heads", "head_dim", "hidden_act", "rope_theta", "rope_scaling",
        "rope_parameters", "partial_rotary_factor",
    }  # fmt: skip

    default_rope_theta: ClassVar[float] = 10_000.0
    hidden_acts: ClassVar[tuple[str, ...]] = ("silu",)

    intermediate_size: PositiveInt
    rms_norm_eps: PositiveFloat
    rope: RopeConfig

    @model_validator(mode="after")
    def _check_head_dim(self) -> Self:
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd; rotary embedding turns pairs")
        return self

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, hidden_act=cls.hidden_acts)
        n_heads = config.get("num_attention_heads")
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = _default_head_dim(config.get("hidden_size"), n_heads)
        n_kv_heads = config.get("num_key_value_heads")
        return {
            "n_kv_heads": n_heads if n_kv_heads is None else n_kv_heads,
            "head_dim": head_dim,
            "rope": read_rope(config, cls.default_rope_theta),
        }


def require(config: JsonObject, **allowed: Sequence[Any]) -> None:
    """Refuses a config whose value of one of these keys is there and not among those allowed."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise UnsupportedModel(
                f"config.json: {key} {config[key]!r} is not supported, only {values[0]!r} is"
            )


def read_json_files(directory: Path) -> tuple[JsonObject, JsonObject]:
    """The contents of `config.json` and of `generation_config.json`, which may be missing."""
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return _read_json(directory / "config.json"), generation


def architecture_of(config: JsonObject) -> str:
    """The one class that the checkpoint says it is of."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnsupportedModel(f"config.json: architectures {architectures!r} names no single one")
    return str(architectures[0])


def read_windows(
    config: JsonObject, *, window: int | None, default: Sequence[bool]
) -> tuple[int | None, ...]:
    """The window of each layer: as `layer_types` says, else where `default` is true."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(window if is_sliding else None for is_sliding in default)
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != config.get("num_hidden_layers"):
        raise UnsupportedModel(
            f"config.json: layer_types has {len(layer_types)} entries for "
            f"{config.get('num_hidden_layers')} layers, of unknown types {sorted(unknown)}"
        )
    if window is None and "sliding_attention" in layer_types:
        raise UnsupportedModel("config.json: layer_types names sliding layers without a window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def read_rope(config: JsonObject, default_theta: float) -> JsonObject:
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
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or default_theta
    # Some files carry settings of types that they do not use; these are what other programs skip.
    unknown = set(given) - {key for keys in _ROPE_KEYS.values() for key in keys}
    if unknown:
        raise UnsupportedModel(f"config.json: unknown rotary settings {sorted(unknown)}")
    used = {key: given.get(key) for key in _ROPE_KEYS[rope_type]}
    return {"rope_type": rope_type, "rope_theta": theta, **used}


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


def _refuse_unknown_keys(config: JsonObject, known: set[str]) -> None:
    unknown = {
        key: value
        for key, value in config.items()
        # A leading underscore marks bookkeeping of the program that wrote the file.
        if value and key not in known and key not in _HARMLESS_KEYS and not key.startswith("_")
    }
    if unknown:
        raise UnsupportedModel(f"config.json has options that are not supported: {unknown}")


def _default_head_dim(hidden_size: Any, n_heads: Any) -> int | None:
    if not isinstance(hidden_size, int) or not isinstance(n_heads, int) or n_heads < 1:
        return None  # the validation of these fields has the better message
    if hidden_size % n_heads:
        raise UnsupportedModel(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({n_heads}) and there is no head_dim"
        )
    return hidden_size // n_heads


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
