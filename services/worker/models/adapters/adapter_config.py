"""The configuration of an adapter, `adapter_config.json` as PEFT writes it.

No key is skipped silently: a key that has a value and would change what the adapter computes is
refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.cannot_start import CannotStart
from services.worker.models.name_pattern import NamePattern

CONFIG_FILE = "adapter_config.json"

MAX_RANK = 256
"""Largest rank of an adapter."""

_MAX_ALPHA = 1e9
"""Largest absolute value of alpha. The product of a larger one and a matrix could exceed the range
of float32."""

MAX_CONFIG_BYTES = 4 << 20
"""Largest size of an `adapter_config.json`, in bytes."""

# Keys that change nothing that is computed from the tensors of the file.
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
))  # fmt: skip

# Ways of initialising an adapter that leave the base model's weights as they are.
_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")

_FEATURES: Mapping[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules that were trained",
    "trainable_token_indices": "trained embeddings of tokens",
    "lora_bias": "biases of adapters",
    "target_parameters": "adapters of parameters that are no linear layers",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "adapters that begin at a token (aLoRA)",
    "use_qalora": "QALoRA",
}


class AdapterError(CannotStart):
    """An adapter cannot be served; the message names the adapter's file, without its directory, and
    what is wrong."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The rank and the scale of each module of an adapter."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: tuple[tuple[NamePattern, int], ...] = ()
    alpha_pattern: tuple[tuple[NamePattern, float], ...] = ()

    @property
    def largest_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.rank, *(rank for _, rank in self.rank_pattern), 0)

    def rank_of(self, module: str) -> int:
        """Returns the rank of the matrices of a module."""
        return next((rank for name, rank in self.rank_pattern if name.matches(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of the product of a module's two matrices."""
        alpha = next(
            (alpha for name, alpha in self.alpha_pattern if name.matches(module)), self.alpha
        )
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def parse_lora_config(content: bytes) -> LoraConfig:
    """Returns the configuration in the content of an `adapter_config.json`. Raises AdapterError if
    it is invalid, or if the adapter has a feature that is not served."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_FILE} holds no JSON object")
    try:
        return _parsed(config)
    except ValueError as error:
        raise AdapterError(f"{CONFIG_FILE}: {error}") from error


def _parsed(config: Mapping[str, Any]) -> LoraConfig:
    """Returns the configuration in the JSON object `config`. Raises ValueError if it is invalid or
    has a feature that is not served. The message begins with the wrong key."""
    left = {key: value for key, value in config.items() if key not in _HARMLESS}
    kind = left.pop("peft_type", None)
    if kind != "LORA":
        raise ValueError(f"peft_type: {kind!r} is not served, only 'LORA'")
    if left.get("bias", "none") != "none":
        raise ValueError(f"bias: {left['bias']!r} is not served: trained biases")
    initialisation = left.pop("init_lora_weights", True)
    if initialisation not in _INITIALISATIONS:
        raise ValueError(
            f"init_lora_weights: {initialisation!r} is not served, since it changes the weights of "
            "the base model; convert the adapter to plain LoRA"
        )
    rank = _rank("r", left.pop("r", 8))
    alpha = _alpha("lora_alpha", left.pop("lora_alpha", 8))
    is_rank_stabilised = left.pop("use_rslora", False)
    if not isinstance(is_rank_stabilised, bool):
        raise ValueError(f"use_rslora: {is_rank_stabilised!r} is neither true nor false")
    ranks = _patterns("rank_pattern", left.pop("rank_pattern", None))
    alphas = _patterns("alpha_pattern", left.pop("alpha_pattern", None))
    left.pop("bias", None)
    for key, value in left.items():
        if value not in (None, False, "", [], {}):
            raise ValueError(f"{key}: {_FEATURES.get(key, 'this feature')} is not served")
    return LoraConfig(
        rank,
        alpha,
        is_rank_stabilised,
        tuple((name, _rank("rank_pattern", value)) for name, value in ranks),
        tuple((name, _alpha("alpha_pattern", value)) for name, value in alphas),
    )


def _rank(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise ValueError(f"{key}: {value!r} is no rank from 1 to {MAX_RANK}")
    return value


def _alpha(key: str, value: object) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= _MAX_ALPHA
    ):
        raise ValueError(f"{key}: {str(value)[:80]} is no number up to {_MAX_ALPHA}")
    return float(value)


def _patterns(key: str, value: object) -> list[tuple[NamePattern, object]]:
    """Returns patterns of module names, each with its value in the JSON object `value`. As in PEFT,
    a pattern matches a whole name or the part of a name after any dot."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: {value!r} is no object")
    try:
        return [(NamePattern(rf"(.*\.)?({name})$"), each) for name, each in value.items()]
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
