"""Reads the configuration of a checkpoint's model, or raises the reason why the model cannot be
served.

No key of `config.json` is skipped silently. A key that the family's configuration does not know is
refused by name, unless the key is switched off (null, false or empty). The values of known keys are
validated by pydantic against the types of the configuration's fields. Only this file and
`quantization_config/` need pydantic, and they are imported only to load a checkpoint.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.common import bounded_file
from services.common.context_length import GGUF_STRETCHING, STRETCHING, stated_context
from services.common.derived import Derived
from services.common.gguf.header import GgufHeader, is_gguf, read_header
from services.common.gguf.model_config import frequency_factors, model_config
from services.common.pooling import Pooling, PoolingSetting
from services.common.tokenizer_files.end_token import end_token
from services.worker.models import quantization_config
from services.worker.models.config import (
    Count,
    JsonObject,
    ModelConfig,
    UnsupportedModel,
)
from services.worker.models.ends_of_turn import ends_of_turn
from services.worker.models.gguf_places import check_places, types_in_words
from services.worker.models.in_words import quantisation_in_words, rope_in_words
from services.worker.models.model_types import ARCHITECTURES, family_architecture
from services.worker.models.pooling_files import MODULES, of_encoder, read_pooling
from services.worker.models.registry import FAMILIES
from services.worker.models.rotary_config import RotaryConfig, with_one_rope
from services.worker.models.served_context import served_context
from services.worker.models.text_half import WRAPPERS, text_half

# Keys without effect on the computation of any model: training, other tasks, text, and defaults of
# generation, which the client chooses. `auto_map` names programs of the checkpoint, which are not
# run, as in `transformers` and vLLM.
_HARMLESS_KEYS = frozenset((
    "attention_dropout", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_matryoshka", "label2id", "length_penalty", "matryoshka_dimensions",
    "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sentence_transformers", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tokenizer_class", "top_k", "top_p", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache",
))  # fmt: skip

_MAX_FILE_BYTES = 4 << 20  # the largest files list thousands of classes, in a megabyte

# Shortens values in messages, which may be megabytes.
_SHORT = reprlib.Repr()
_SHORT.maxdict, _SHORT.maxstring = 16, 80

# Keys that every model of `transformers` reads, and that are switched on if they are missing.
_ON_BY_DEFAULT = frozenset(("is_causal",))

# Booleans that families read themselves.
_BOOLEAN_KEYS = frozenset(("use_sliding_window",))

# Tokens in `config.json`, also if nothing reads them. `transformers` refuses a value that is no
# token, too.
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Keys of every family that this file reads.
_COMMON_KEYS = frozenset((
    *quantization_config.KEYS, "architectures", "eos_token_id", "torch_dtype", "dtype",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """The configuration of a checkpoint's model, and the origin of each value that several files or
    keys can give.

    The keys of `derived` are "context", "rope", "ends of turn" and "quantisation".
    """

    config: ModelConfig
    derived: Mapping[str, Derived[Any]]
    ignored_keys: tuple[str, ...] = ()
    """Keys of `config.json` that have a value but do not affect the results of the text model."""
    pooling: Pooling | None = None
    """How hidden states become vectors; None if the checkpoint makes none."""


def read_config(model: Path) -> ModelConfig:
    """Returns the configuration of the model in a checkpoint's directory or GGUF file.

    Raises UnsupportedModel if the model cannot be served, or no family implements its architecture.
    """
    if is_gguf(model):
        return read_gguf_config(read_gguf_header(model)).config
    return read_directory_config(model).config


def read_directory_config(
    directory: Path, max_model_len: int | None = None, pooling: PoolingSetting = ""
) -> ReadConfig:
    """Returns the configuration of the model in a checkpoint's directory. Raises UnsupportedModel
    if the model cannot be served.

    `max_model_len` is the operator's setting for the longest sequence, and `pooling` the setting
    that says how vectors are made.
    """
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        named = end_token(directory)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(str(error)) from error
    config = _read_json(directory / "config.json")
    if not any(config.get(key) for key in quantization_config.KEYS):
        config = {**config, **_quantization_beside(directory)}
    read = parse_with_sources(config, generation, named, max_model_len=max_model_len)
    found = read_pooling(directory, config, pooling, hidden_size=read.config.hidden_size)
    return replace(read, pooling=_checked_pooling(found, config, read.config))


def _checked_pooling(
    pooling: Pooling | None, config: JsonObject, parsed: ModelConfig
) -> Pooling | None:
    """Returns `pooling`. An encoder, or a model without a head for tokens, generates none. `config`
    is the content of `config.json`, and `parsed` the configuration in it.

    Raises UnsupportedModel if the checkpoint has neither such a head nor pooling.
    """
    named = str((config.get("architectures") or [parsed.architecture])[0])
    has_head = not named.endswith("Model") or named in FAMILIES
    if parsed.is_causal and has_head:
        return pooling
    if pooling is None:
        lacks = "has no head" if parsed.is_causal else "generates no tokens"
        raise UnsupportedModel(
            f"config.json: architecture {_SHORT.repr(named)} {lacks}, and no {MODULES} or "
            "setting `pooling` says how it makes vectors"
        )
    if not parsed.is_causal:
        return of_encoder(
            pooling,
            token_type_stride=parsed.token_type_stride,
            padding_token_id=parsed.skipped_token_id,
        )
    if pooling.head == "yes-no":
        raise UnsupportedModel(f"pooling: yes-no needs a head, which {_SHORT.repr(named)} lacks")
    return replace(pooling, generates=False)


def _quantization_beside(directory: Path) -> JsonObject:
    """Reads the quantisation settings from a separate file of the checkpoint. Returns them under
    the key `quantization_config`, as `config.json` would have them, or an empty mapping if there is
    no such file."""
    for name, method in quantization_config.OTHER_FILES.items():
        if (directory / name).exists():
            given = _read_json(directory / name)
            return {"quantization_config": {"quant_method": method, **given}}
    return {}


def read_gguf_header(path: Path) -> GgufHeader:
    """Returns the header of a GGUF file; raises UnsupportedModel for a broken file."""
    try:
        header = read_header(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(str(error)) from error
    check_places(header)
    return header


def read_gguf_config(
    header: GgufHeader, max_model_len: int | None = None, pooling: PoolingSetting = ""
) -> ReadConfig:
    """Returns the configuration in the metadata of a GGUF file. Raises UnsupportedModel if the
    model cannot be served.

    `max_model_len` and `pooling` are as for `read_directory_config`. No file names the pooling.
    """
    try:
        read = parse_with_sources(
            model_config(header), {}, max_model_len=max_model_len, stretching=GGUF_STRETCHING
        )
        factors = frequency_factors(header)
    except UnsupportedModel as error:
        message = str(error).removeprefix("config.json: ")
        raise UnsupportedModel(f"{header.path}: {message}") from error
    except (OSError, ValueError) as error:
        message = str(error).removeprefix(f"{header.path}: ")
        raise UnsupportedModel(f"{header.path}: {message}") from error
    pooled = read_pooling(header.path, {}, pooling, hidden_size=read.config.hidden_size)
    read = replace(read, derived=_gguf_sources(header, read.derived), pooling=pooled)
    if factors is None:
        return read
    config = read.config
    if not isinstance(config, RotaryConfig):
        raise UnsupportedModel(f"{header.path}: rope_freqs.weight of {config.architecture}")
    rope = replace(config.rope, frequency_factors=factors)
    factored = replace(config, rope=rope)
    try:
        factored.check()
    except ValueError as error:
        raise UnsupportedModel(f"{header.path}: {error}") from error
    return replace(read, config=factored)


def _gguf_sources(
    header: GgufHeader, derived: Mapping[str, Derived[Any]]
) -> dict[str, Derived[Any]]:
    """Returns derived values for a GGUF file. Their origins name the file's metadata instead of
    keys of `config.json`."""
    metadata = f"metadata of {header.path.name}"
    sourced = {name: Derived(value.value, metadata) for name, value in derived.items()}
    types = Derived(types_in_words(header), "types of the tensors")
    return {**sourced, "quantisation": types}


def parse_config(config: JsonObject, generation: JsonObject) -> ModelConfig:
    """Returns the configuration that `config.json` and `generation_config.json` contain.

    Raises UnsupportedModel if the model cannot be served.
    """
    return parse_with_sources(config, generation).config


def parse_with_sources(
    config: JsonObject,
    generation: JsonObject,
    named_end: Derived[int] | None = None,
    *,
    max_model_len: int | None = None,
    stretching: Collection[str] = STRETCHING,
) -> ReadConfig:
    """Returns the configuration, as `parse_config` does, together with the origins of its values.

    `named_end` is the `eos_token` of `tokenizer_config.json`, and `max_model_len` the operator's
    setting for the longest sequence. For `stretching` see `stated_context`. Raises
    UnsupportedModel.
    """
    given = config
    half = text_half(config, _architecture_of(config))
    _refuse_unknown_keys(half.around, set())
    config = with_one_rope(half.config)
    architecture = _architecture_of(config)
    if architecture not in FAMILIES:
        named = _SHORT.repr(architecture)
        raise UnsupportedModel(
            f"config.json: architecture {named} is not one of {sorted([*FAMILIES, *WRAPPERS])}"
        )
    config_type = FAMILIES[architecture].config_type
    ends = ends_of_turn(config, generation, named_end, config_type.default_eos_token_ids)
    derived = {
        "eos_token_ids": ends.value,
        "checkpoint_dtype": _checkpoint_dtype(config),
        **_read_derived(config_type, config),
        "weight_format": quantization_config.read_weight_format(
            config, _summary, config_type.own_quantizations
        ),
    }
    plain_keys = {key for name, key in config_type.keys().items() if name not in derived}
    _refuse_unknown_keys(
        config, plain_keys | config_type.read_keys | config_type.ignored_keys | _COMMON_KEYS
    )
    plain = {key: config[key] for key in plain_keys if config.get(key) is not None}
    _refuse_no_tokens(config)
    _refuse_untrue(config_type, {**config, **plain, **derived})
    try:
        parsed = _validator_of(architecture).validate_python(plain | derived)
        parsed.check()
    except ValidationError as error:
        raise UnsupportedModel(f"config.json: {_summary(error)}") from error
    except ValueError as error:
        raise UnsupportedModel(f"config.json: {error}") from error
    plain_length = Derived(parsed.max_position_embeddings, "default of the family")
    stated = stated_context(config, stretching) or plain_length
    context = served_context(parsed, stated, max_model_len)
    parsed = replace(parsed, max_position_embeddings=context.value)
    return ReadConfig(
        parsed,
        {
            "context": context,
            "rope": rope_in_words(parsed, config),
            "ends of turn": replace(ends, value=parsed.eos_token_ids),
            "quantisation": quantisation_in_words(parsed, config),
        },
        _ignored_keys(given, config, config_type),
    )


@cache
def _validator_of(architecture: str) -> TypeAdapter[ModelConfig]:
    """Returns the validator of the configuration of a family. Making a validator takes long, so it
    is kept."""
    return TypeAdapter(FAMILIES[architecture].config_type)


def _ignored_keys(
    given: JsonObject, config: JsonObject, config_type: type[ModelConfig]
) -> tuple[str, ...]:
    """Returns the keys of `given`, the whole file, that were not used. `config` has the keys of the
    text model."""
    unread = _HARMLESS_KEYS | config_type.ignored_keys | (given.keys() - config.keys())
    keys = {**given, **config}
    return tuple(sorted(key for key in unread & keys.keys() if keys[key] and key != "text_config"))


def _refuse_untrue(config_type: type[ModelConfig], values: JsonObject) -> None:
    """Raises UnsupportedModel if a boolean field has a value that is not a boolean.

    Without this check, pydantic would accept numbers, and texts such as "no".
    """
    booleans = {each.name for each in fields(config_type) if each.type == "bool"}
    keys = config_type.keys()
    for key in sorted({keys[name] for name in booleans} | booleans | _BOOLEAN_KEYS):
        value = values.get(key)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedModel(f"config.json: {key} {_SHORT.repr(value)} is no boolean")


def _refuse_no_tokens(config: JsonObject) -> None:
    """Raises UnsupportedModel if a key for a token is neither null nor an integer. The key
    `eos_token_id` may also be a list of integers."""
    for key in _TOKEN_KEYS:
        value = config.get(key)
        tokens = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if value is not None and any(type(token) is not int for token in tokens):
            raise UnsupportedModel(f"config.json: {key} {_SHORT.repr(value)} is no token")


def _read_derived(config_type: type[ModelConfig], config: JsonObject) -> JsonObject:
    """Returns the fields that the family's own `read` computes from the unvalidated `config`.

    If a value has an unexpected type, `read` raises one of Python's errors, which is converted to
    UnsupportedModel. The number of layers is validated first, since `read` may build a list of that
    length.
    """
    key = config_type.keys()["n_layers"]
    try:
        TypeAdapter(Count | None).validate_python(config.get(key))
        return config_type.read(config)
    except ValidationError as error:
        raise UnsupportedModel(f"config.json: {key}: {_summary(error)}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModel(f"config.json: a value is of the wrong type: {error}") from error
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise UnsupportedModel(f"config.json: {error}") from error


def _architecture_of(config: JsonObject) -> str:
    """Returns the architecture of the checkpoint, as `transformers` chooses it.

    This is the architecture of `model_type`, if `architectures` is missing or names another family.
    Otherwise it is the single entry of `architectures`. Raises UnsupportedModel if neither key
    determines the architecture.
    """
    architectures, model_type = config.get("architectures"), config.get("model_type")
    of_type = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if not architectures and of_type is not None:
        return of_type
    if not isinstance(architectures, list) or len(architectures) != 1:
        named = _SHORT.repr(architectures)
        raise UnsupportedModel(
            f'config.json: architectures {named} names no single one, as ["LlamaForCausalLM"] does'
        )
    named = str(architectures[0])
    family = family_architecture(named)
    return of_type if family in FAMILIES and of_type is not None else family


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        return bounded_file.read_json_object(path, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise UnsupportedModel(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(str(error)) from error


def _refuse_unknown_keys(config: JsonObject, known: set[str]) -> None:
    unknown = {
        key: value
        for key, value in config.items()
        # A key with a leading underscore is internal to the program that wrote the file.
        if key not in known | _HARMLESS_KEYS and not key.startswith("_") and not _is_off(key, value)
    }
    if unknown:
        raise UnsupportedModel(
            f"config.json has options that are not supported: {_SHORT.repr(unknown)}"
        )


def _is_off(key: str, value: Any) -> bool:
    """Returns whether `value` switches `key` off, so that the key changes nothing: null, false or
    empty, or true for the keys `_ON_BY_DEFAULT`."""
    return value is True if key in _ON_BY_DEFAULT else not value


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Returns the value of `dtype` or, in older files, `torch_dtype`; by default float32."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _summary(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, detail['loc'])) or 'model'}: {detail['msg']}"
        for detail in error.errors()
    )
