"""Makes the configuration of a model from the content of `config.json`, or raises the reason why
the model cannot be served.

The keys are checked by `config_keys.py`. The values of known keys are validated by pydantic against
the types of the configuration's fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.common.context_length import STRETCHING, stated_context
from services.common.derived import Derived
from services.common.pooling import Pooling
from services.worker.models import quantization_config
from services.worker.models.config import (
    Count,
    JsonObject,
    ModelConfig,
    UnsupportedModel,
)
from services.worker.models.config_keys import (
    check_booleans,
    check_token_ids,
    ignored_keys,
    refuse_unknown_keys,
    shortened,
)
from services.worker.models.ends_of_turn import ends_of_turn
from services.worker.models.in_words import quantisation_in_words, rope_in_words
from services.worker.models.model_types import ARCHITECTURES, family_architecture
from services.worker.models.registry import FAMILIES
from services.worker.models.rotary_config import with_one_rope
from services.worker.models.served_context import served_context
from services.worker.models.text_half import WRAPPERS, text_half

# Keys that are read for every family.
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
    """How vectors (embeddings or scores) are made of hidden states; None if the model makes
    none."""


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

    `named_end` is the `eos_token` of `tokenizer_config.json`. `max_model_len` is the operator's
    setting for the longest sequence. For `stretching` see `stated_context`. Raises
    UnsupportedModel.
    """
    given = config
    half = text_half(config, _architecture_of(config))
    refuse_unknown_keys(half.around, set())
    config = with_one_rope(half.config)
    architecture = _architecture_of(config)
    if architecture not in FAMILIES:
        named = shortened(architecture)
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
    refuse_unknown_keys(
        config, plain_keys | config_type.read_keys | config_type.ignored_keys | _COMMON_KEYS
    )
    plain = {key: config[key] for key in plain_keys if config.get(key) is not None}
    check_token_ids(config)
    check_booleans(config_type, {**config, **plain, **derived})
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
        ignored_keys(given, config, config_type),
    )


@cache
def _validator_of(architecture: str) -> TypeAdapter[ModelConfig]:
    """Returns the validator for the configuration of a family. It is cached, because making a
    validator takes long."""
    return TypeAdapter(FAMILIES[architecture].config_type)


def _read_derived(config_type: type[ModelConfig], config: JsonObject) -> JsonObject:
    """Returns the fields that the family's own `read` computes from the unvalidated `config`.

    If a value has an unexpected type, `read` raises one of Python's errors, which is converted to
    UnsupportedModel. The number of layers is validated first, because `read` may build a list of
    that length.
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

    If `model_type` names a family, and `architectures` is missing or names a family too,
    `model_type` decides. Otherwise the single entry of `architectures` decides. Raises
    UnsupportedModel if neither key determines the architecture.
    """
    architectures, model_type = config.get("architectures"), config.get("model_type")
    of_type = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if not architectures and of_type is not None:
        return of_type
    if not isinstance(architectures, list) or len(architectures) != 1:
        named = shortened(architectures)
        raise UnsupportedModel(
            f'config.json: architectures {named} names no single one, as ["LlamaForCausalLM"] does'
        )
    named = str(architectures[0])
    family = family_architecture(named)
    return of_type if family in FAMILIES and of_type is not None else family


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Returns the value of `dtype` or, in older files, `torch_dtype`; by default float32."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _summary(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, detail['loc'])) or 'model'}: {detail['msg']}"
        for detail in error.errors()
    )
