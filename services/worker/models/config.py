"""The configuration of a model, and how its fields correspond to the keys of `config.json`.

The configuration of a family is a frozen dataclass in the file of its model, a subclass of
`ModelConfig`. The fields are the values that the computation needs, so code can also create a
configuration directly. Each field is declared with the rule for reading it from `config.json`; only
`config_json.py` uses these rules. A field is read from the key of the same name, or from the key
that its metadata names as "alias". If a field depends on more than one key, the method `read`
computes the field, and `read_keys` names these keys. `ignored_keys` are keys that do not change the
results of the family.

This module uses no files and no tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import torch

from services.common.cannot_start import CannotStart
from services.worker.models.weight_format import WeightFormat


class _Limits:
    """The allowed range of a numeric field, in the form that pydantic validates.

    Only JSON numbers are accepted. A text such as "8" and a boolean are refused.
    """

    def __init__(self, **limits: Any) -> None:
        self._limits = {**limits, "strict": True}  # keys of pydantic's schemas

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], Mapping[str, Any]]
    ) -> dict[str, Any]:
        return {**handler(source), **self._limits}


MAX_SIZE = 2**31 - 1
"""The largest size of a dimension, and the largest token id. Kernels index rows with 32-bit
integers."""

PositiveInt = Annotated[int, _Limits(gt=0, le=MAX_SIZE)]
Count = Annotated[int, _Limits(gt=0, le=1024)]
"""Type of a field that is a number of layers or experts. The limit is far above every real model.
It bounds the memory of loading, since each layer or expert becomes an object."""
NonNegativeInt = Annotated[int, _Limits(ge=0, le=MAX_SIZE)]
TokenId = Annotated[int, _Limits(ge=0, le=MAX_SIZE)]
PositiveFloat = Annotated[float, _Limits(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, _Limits(ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, _Limits()]
"""Type of a boolean field inside a group of settings. `config_keys.py` checks booleans at the top
level."""
JsonObject = Mapping[str, Any]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KVSizes:
    """The sizes, in elements, of the keys and values that a layer stores for each token."""

    n_heads: int  # 0: the layer stores nothing
    key_dim: int
    value_dim: int  # 0: values are a part of the keys

    def of_rank(self, tp_size: int) -> KVSizes:
        """Returns the sizes on one of `tp_size` ranks. Every rank stores an equal number of heads.
        If there are fewer heads than ranks, each rank stores a copy of one head."""
        n_heads = max(self.n_heads // tp_size, 1) if self.n_heads else 0
        return KVSizes(n_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The sizes, in elements, of the memory that a layer keeps for each request. The sizes do not
    depend on the length of the request.

    The memory consists of a state for each head and of the last inputs of a convolution. See
    `Ops.delta_net`.
    """

    n_heads: int  # value heads
    key_dim: int
    value_dim: int
    n_inputs: int  # inputs of the convolution, one a token
    n_channels: int  # elements of each input

    def of_rank(self, tp_size: int) -> StateSizes:
        """Returns the sizes on one of `tp_size` ranks. Every rank has an equal number of heads."""
        return replace(self, n_heads=self.n_heads // tp_size, n_channels=self.n_channels // tp_size)


class UnsupportedModel(CannotStart):
    """The checkpoint needs a computation that is not implemented; the message names the feature."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields that every family has, and the rules for reading them from `config.json`.

    The key of a field is the field's name or alias, unless the method `read` computes the field.
    """

    architecture: ClassVar[str]  # the entry of `architectures` in config.json
    read_keys: ClassVar[frozenset[str]] = frozenset()  # the keys that `read` uses
    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    # Methods of `quantization_config` that `read` handles itself.
    own_quantizations: ClassVar[frozenset[str]] = frozenset()
    # The tokens that end an output if no file of the checkpoint names one.
    default_eos_token_ids: ClassVar[tuple[int, ...]] = ()
    # False for encoders, in which each token attends to all tokens of its text.
    is_causal: ClassVar[bool] = True

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    n_layers: Count = field(metadata={"alias": "num_hidden_layers"})
    n_heads: PositiveInt = field(metadata={"alias": "num_attention_heads"})
    n_kv_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt  # longest sequence, tokens
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[TokenId, ...] = ()  # tokens that end an output
    # Element type of the files.
    checkpoint_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    weight_format: WeightFormat | None = None  # of matrices that are quantised in the files

    @property
    def token_type_stride(self) -> int:
        """Number that is added to the id of a token in the second text of a pair, such as a query
        and a document. 0 for models that do not distinguish the two texts."""
        return 0

    @property
    def skipped_token_id(self) -> int | None:
        """Id of the padding token, if the model's positions skip this token. No prompt may contain
        it, because positions here count every token. None if the model's positions count all
        tokens."""
        return None

    @property
    def n_unused_positions(self) -> int:
        """Number of positions that no token can have, although the file's `max_position_embeddings`
        counts them."""
        return 0

    @property
    def layer_windows(self) -> Sequence[int | None]:
        """For each layer, the number of keys that a query attends to, including its own key. None
        means all earlier keys."""
        return (None,) * self.n_layers

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        """The sizes of the keys and values that each layer stores for a token, on all ranks
        together."""
        return (KVSizes(self.n_kv_heads, self.head_dim, self.head_dim),) * self.n_layers

    @property
    def kv_sources(self) -> Sequence[int]:
        """For each layer, the index of the layer whose stored keys and values it attends to: its
        own index, or an earlier one. A layer that attends to an earlier layer stores no keys and
        values."""
        return range(self.n_layers)

    @property
    def layer_states(self) -> Sequence[StateSizes | None]:
        """For each layer, the sizes of the state that it keeps for a request, on all ranks
        together. None means no state."""
        return (None,) * self.n_layers

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Returns, for each field, its key in `config.json`. Fields that the method `read` computes
        are included, but not read from this key."""
        return {field.name: field.metadata.get("alias", field.name) for field in fields(cls)}

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        """Returns the fields that depend on more than one key of `config`.

        In this class these fields are `n_kv_heads`, which equals the number of query heads, and
        `head_dim`. Families extend this method, and raise UnsupportedModel for features that they
        do not compute.
        """
        keys = cls.keys()
        hidden_size, n_heads = config.get(keys["hidden_size"]), config.get(keys["n_heads"])
        return {"n_kv_heads": n_heads, "head_dim": default_head_dim(hidden_size, n_heads)}

    def check(self) -> None:
        """Raises ValueError if fields contradict each other. The message names the keys in
        `config.json`."""
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.n_heads}) is not a multiple of "
                f"num_key_value_heads ({self.n_kv_heads})"
            )

    def resolve_dtype(self, dtype: str) -> torch.dtype:
        """Returns the element type that `dtype` names: float32, bfloat16, or auto. Raises
        UnsupportedModel for any other name.

        "auto" is the element type of the checkpoint.

        A float16 checkpoint runs in float32 under "auto": bfloat16 would drop bits of its weights,
        and processors compute float16 slowly.
        """
        if dtype == "auto":
            return _DTYPES.get(self.checkpoint_dtype, torch.float32)
        if dtype not in _DTYPES:
            raise UnsupportedModel(f"dtype {dtype!r} is not one of {['auto', *_DTYPES]}")
        return _DTYPES[dtype]

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the configuration without the element type, in hexadecimal digits.
        Files that spell the same configuration differently have equal digests."""
        meaning = asdict(self) | {"architecture": self.architecture}
        del meaning["checkpoint_dtype"]
        canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def require(config: JsonObject, **allowed: Sequence[Any]) -> None:
    """Raises UnsupportedModel if `config` has one of the keys in `allowed`, but with a value that
    is not allowed."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise UnsupportedModel(
                f"config.json: {key} {config[key]!r} is not supported, only {values[0]!r} is"
            )


def read_windows(
    config: JsonObject, *, window: int | None, default: Sequence[bool]
) -> tuple[int | None, ...]:
    """Returns the window of each layer, None for a layer without a window. The key `layer_types`
    says which layers have a window; if the key is missing, `default` says it. Raises
    UnsupportedModel for an unknown type of layer, a wrong number of layers, or a missing window."""
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


def default_head_dim(hidden_size: Any, n_heads: Any) -> int | None:
    """Returns `hidden_size` divided by `n_heads`: the size of a head by default.

    Raises UnsupportedModel if the division leaves a remainder. Returns None if an argument is not a
    positive integer, because the key is validated later and the error is reported there.
    """
    if not isinstance(hidden_size, int) or not isinstance(n_heads, int) or n_heads < 1:
        return None
    if hidden_size % n_heads:
        raise UnsupportedModel(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({n_heads}) and there is no head_dim"
        )
    return hidden_size // n_heads
