"""Describes an architecture of GGUF files: how its metadata keys correspond to keys of
`config.json`, and how its tensors correspond to the tensors of a model family.

Each file in `architectures/` describes one architecture or several that are alike. The rest of the
program does not distinguish architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.gguf.header import GgufHeader
from services.common.gguf.tensor_rules import Rules

Config = dict[str, Any]

# Keys of most architectures, behind the architecture's name, and what `config.json` calls them.
SIZES: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


# Ends of the keys whose values are fractions in the format.
_FRACTIONS = (
    "_epsilon", "_scale", "attention.scale", "freq_base", "freq_base_swa", "multiplier",
    "scaling.factor", "softcapping",
)  # fmt: skip


class Metadata:
    """Reads the metadata of one GGUF file, under the keys of its architecture. Errors name the key
    and the file."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self._prefix = f"{architecture}."

    def value(self, key: str) -> Any:
        """Returns the value that the file has under a key of the architecture, or None if the key
        is missing. The value may have any type."""
        return self.header.metadata.get(self._prefix + key)

    def number(self, key: str) -> int | float | None:
        """Returns the number under a key, or None if the key is missing.

        If the value is a list with an equal number for each layer, that number is returned. Raises
        ValueError if the value is neither a number nor such a list. Also raises ValueError for a
        whole number where the format requires a fraction, because llama.cpp refuses such a file,
        too.
        """
        value = self.value(key)
        if _is_list(value) and len(set(value)) == 1:
            value = value[0]
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{self.name(key)} is {repr(value)[:80]}, and not one number")
        if isinstance(value, int) and key.endswith(_FRACTIONS):
            raise ValueError(f"{self.name(key)} is the whole number {value}, and no fraction")
        return value

    def integer(self, key: str) -> int | None:
        """Returns the integer under a key, or None if the key is missing. Raises ValueError if the
        value is not an integer."""
        value = self.number(key)
        if isinstance(value, float):
            raise ValueError(f"{self.name(key)} is {value}, and no integer")
        return value

    def needed(self, key: str) -> int:
        """Returns the integer under a key. Raises ValueError if the key is missing or its value is
        not an integer."""
        value = self.integer(key)
        if value is None:
            raise ValueError(f"{self.name(key)} is missing")
        return value

    def per_layer(self, key: str, n_layers: int) -> list[Any] | None:
        """Returns, for each of the first `n_layers` layers, its number under a key. Returns None if
        the key is missing. The file has a list of numbers, or one number for all layers. Raises
        ValueError if the list has fewer numbers, or if a value is not a number."""
        value = self.value(key)
        if value is None:
            return None
        values = list(value) if _is_list(value) else [value] * n_layers
        if len(values) < n_layers or not all(isinstance(each, (int, float)) for each in values):
            raise ValueError(f"{self.name(key)} has no number for each of {n_layers} layers")
        return values[:n_layers]

    def name(self, key: str) -> str:
        """Returns the full name of a key and the path of the file, for error messages."""
        return f"{self.header.path}: {self._prefix}{key}"

    def has(self, tensor: str) -> bool:
        """Returns whether the file has a tensor."""
        return tensor in self.header.tensors

    def has_in_layers(self, tensor: str) -> bool:
        """Returns whether any layer has the tensor `tensor`, a name without the prefix of the
        layer."""
        return any(name.endswith(f".{tensor}") for name in self.header.tensors)

    def n_rows(self, tensor: str) -> int | None:
        """Returns the size of a tensor's first dimension, or None if the file lacks the tensor."""
        place = self.header.tensors.get(tensor)
        return place.shape[0] if place is not None and place.shape else None

    def keys(self) -> Mapping[str, Any]:
        """Returns all keys of the architecture with their values. The architecture's name, with
        which these keys begin in the file, is left out."""
        return {
            key.removeprefix(self._prefix): value
            for key, value in self.header.metadata.items()
            if key.startswith(self._prefix)
        }


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str)


def nothing(said: Metadata, config: Config) -> Config:
    """Returns an empty configuration. This is the default of `Architecture.more`, for an
    architecture that needs no further keys."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Describes a GGUF architecture: the model family that computes its models, and the rules that
    translate its keys and tensors."""

    family: str  # the class of the family's checkpoints, unless `more` names another one
    tensors: Rules
    # Keys that `config.json` has under another name; `SIZES` and these together.
    keys: Mapping[str, str] = field(default_factory=dict)
    # Sizes whose names in `config.json` differ from `SIZES`.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Keys that `more` reads, or that say again what tensors and other keys say.
    others: frozenset[str] = frozenset()
    # What `config.json` says and GGUF files do not, since all models of the architecture share it.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Returns what depends on several keys, from the metadata and the translated keys.
    more: Callable[[Metadata, Config], Config] = nothing
    is_partial: bool = False  # whether a part of each head is rotated
    has_rope: bool = True
