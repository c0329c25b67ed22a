"""The configuration of a model, in our words, and the keys of `config.json` that say so.

A family's configuration is a frozen dataclass beside its model, a subclass of `ModelConfig`. Its
fields are what the computation needs, so it can as well be made in code. How `config.json` says
them is written beside them and used by `config_file.py` alone: a field is a key there, under its
own name or the alias in its metadata; what takes more than a look at one key is done in `read`,
of the `read_keys`; `ignored_keys` have no effect on what this family computes.

Knows no files and no tensors.
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
    """Says which numbers a field may have; pydantic asks it how to validate them."""

    def __init__(self, **limits: Any) -> None:
        self._limits = limits  # in the words of pydantic's schemas

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], Mapping[str, Any]]
    ) -> dict[str, Any]:
        return {**handler(source), **self._limits}


MAX_SIZE = 2**31 - 1
"""The largest size of a dimension, and the largest token: kernels count within a row in 32 bits."""

PositiveInt = Annotated[int, _Limits(gt=0, le=MAX_SIZE)]
Count = Annotated[int, _Limits(gt=0, le=1024)]
"""A number of layers or experts, each of which is an object: far above those of any model."""
NonNegativeInt = Annotated[int, _Limits(ge=0, le=MAX_SIZE)]
TokenId = Annotated[int, _Limits(ge=0, le=MAX_SIZE)]
PositiveFloat = Annotated[float, _Limits(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, _Limits(ge=0, allow_inf_nan=False)]
JsonObject = Mapping[str, Any]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KVSizes:
    """The keys and values that a layer stores of each token, for `n_heads` heads, in elements."""

    n_heads: int  # 0: the layer stores nothing
    key_dim: int
    value_dim: int  # 0: values are a part of the keys

    def of_rank(self, tp_size: int) -> KVSizes:
        """Returns what one of `tp_size` ranks stores, as many heads as every other one: its part of
        them, or with fewer heads than ranks a copy of one."""
        n_heads = max(self.n_heads // tp_size, 1) if self.n_heads else 0
        return KVSizes(n_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The memory that a layer keeps of each request, however long it is, in elements: a state for
    each head, and the last inputs of a convolution. See `Ops.delta_net`."""

    n_heads: int  # of values
    key_dim: int
    value_dim: int
    n_inputs: int  # tokens
    n_channels: int  # of each

    def of_rank(self, tp_size: int) -> StateSizes:
        """Returns what one of `tp_size` ranks keeps, which have equal parts of the heads."""
        return replace(self, n_heads=self.n_heads // tp_size, n_channels=self.n_channels // tp_size)


class UnsupportedModel(CannotStart):
    """The checkpoint asks for something we do not compute; the message names it."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields that every family has, and how its `config.json` says them.

    A field has the name of its key there, or the key as its alias; or `read` makes it.
    """

    architecture: ClassVar[str]  # what checkpoints of the family call their class
    read_keys: ClassVar[frozenset[str]] = frozenset()  # that `read` makes fields of
    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    # Methods in `quantization_config` that `read` makes fields of.
    own_quantizations: ClassVar[frozenset[str]] = frozenset()

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
    def layer_windows(self) -> Sequence[int | None]:
        """How many keys a query of each layer sees, its own among them; None: all before it."""
        return (None,) * self.n_layers

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        """The keys and values that each layer stores of a token, on all ranks together."""
        return (KVSizes(self.n_kv_heads, self.head_dim, self.head_dim),) * self.n_layers

    @property
    def kv_sources(self) -> Sequence[int]:
        """The layer whose stored keys and values each layer attends to: itself, or an earlier one,
        and then it stores none of its own."""
        return range(self.n_layers)

    @property
    def layer_states(self) -> Sequence[StateSizes | None]:
        """The state that each layer keeps of a request, on all ranks together; None for none."""
        return (None,) * self.n_layers

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Returns each field's key in `config.json`, which counts unless `read` makes the field."""
        return {field.name: field.metadata.get("alias", field.name) for field in fields(cls)}

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        """Returns the fields that take more than a look at one key of `config`.

        In this class these are K/V heads, as many as query heads, and their size. Families extend
        it, and raise UnsupportedModel for what they do not compute.
        """
        keys = cls.keys()
        hidden_size, n_heads = config.get(keys["hidden_size"]), config.get(keys["n_heads"])
        return {"n_kv_heads": n_heads, "head_dim": default_head_dim(hidden_size, n_heads)}

    def check(self) -> None:
        """Raises ValueError for fields that do not go together, in the words of `config.json`."""
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.n_heads}) is not a multiple of "
                f"num_key_value_heads ({self.n_kv_heads})"
            )

    def resolve_dtype(self, dtype: str) -> torch.dtype:
        """Returns the element type that `dtype` names: float32, bfloat16, or auto.

        "auto" is the element type of the checkpoint.

        A float16 checkpoint runs in float32 under "auto": bfloat16 would drop bits of its weights,
        and processors compute float16 slowly.
        """
        if dtype == "auto":
            return _DTYPES.get(self.checkpoint_dtype, torch.float32)
        if dtype not in _DTYPES:
            raise UnsupportedModel(f"dtype {dtype!r} is not one of {['auto', *_DTYPES]}")
        return _DTYPES[dtype]

    def fingerprint(self, dtype: torch.dtype) -> str:
        """Returns a SHA-256 over the model and its element type, however the file spells it."""
        meaning = asdict(self) | {"architecture": self.architecture, "dtype": str(dtype)}
        del meaning["checkpoint_dtype"]
        canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def require(config: JsonObject, **allowed: Sequence[Any]) -> None:
    """Raises UnsupportedModel if a key is there with a value that is not among those allowed."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise UnsupportedModel(
                f"config.json: {key} {config[key]!r} is not supported, only {values[0]!r} is"
            )


def read_windows(
    config: JsonObject, *, window: int | None, default: Sequence[bool]
) -> tuple[int | None, ...]:
    """Returns the window of each layer: as `layer_types` says, else where `default` is true."""
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
    """Returns the size of heads that share `hidden_size`; raises UnsupportedModel if they cannot.

    None for values of other types, which their validation names.
    """
    if not isinstance(hidden_size, int) or not isinstance(n_heads, int) or n_heads < 1:
        return None
    if hidden_size % n_heads:
        raise UnsupportedModel(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({n_heads}) and there is no head_dim"
        )
    return hidden_size // n_heads
