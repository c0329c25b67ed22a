"""The settings of compressed-tensors, as LLM Compressor writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from services.worker.models.config import MAX_SIZE, UnsupportedModel
from services.worker.models.quantization_config.settings import (
    KV_NOTE,
    Method,
    Names,
    Settings,
    Sizes,
)
from services.worker.models.weight_format import Layout, MatrixFormat, WeightFormat

_Format = Literal[
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stored:
    """Describes how compressed-tensors stores weights of one numeric type: the layout, and the
    numbers of bits that the weights may have."""

    layout: Layout
    type: Literal["int", "float"]
    bits: tuple[Literal[4, 8], ...]


_FORMATS: Mapping[str, tuple[_Stored, ...]] = {
    "pack-quantized": (_Stored("packed", "int", (4, 8)),),
    "int-quantized": (_Stored("scaled", "int", (8,)),),
    "float-quantized": (_Stored("scaled", "float", (8,)),),
    "naive-quantized": (_Stored("scaled", "int", (8,)), _Stored("scaled", "float", (8,))),
    "nvfp4-pack-quantized": (_Stored("nvfp4_packed", "float", (4,)),),
    "mxfp4-pack-quantized": (_Stored("mxfp4_packed", "float", (4,)),),
}


class _WeightArgs(Settings):
    """The settings that say how the weights of one group of modules are quantised."""

    ignored = frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))

    num_bits: Literal[4, 8] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    group_size: int | None = Field(default=None, ge=-1, le=MAX_SIZE)
    block_structure: Sizes | None = None
    dynamic: Literal[False] = False
    # With "group", "dynamic" or true, the inputs of a group are not neighbours in the file.
    actorder: Literal["group", "dynamic", "weight", "static"] | bool | None = None

    def block(self) -> tuple[int | None, int | None]:
        """Returns how many outputs and how many inputs share a scale. None means that all of them
        share it."""
        strategy = self.strategy
        if strategy is None:
            strategy = "tensor" if self.group_size is None else "group"
            strategy = "channel" if self.group_size == -1 else strategy
        if strategy in ("group", "tensor_group"):
            if not self.group_size or self.group_size < 1:
                raise ValueError(f"strategy {strategy} needs a group_size")
            return 1, self.group_size
        if strategy == "block":
            if self.block_structure is None or min(self.block_structure) < 1:
                raise ValueError("strategy block needs a block_structure of two sizes")
            return self.block_structure
        return (1, None) if strategy == "channel" else (None, None)


class _Group(Settings):
    """A group of modules that compressed-tensors quantises with equal settings."""

    # Settings of activations and of stored keys and values: see the docstring of the package.
    ignored = frozenset(("input_activations", "output_activations"))

    targets: Names
    weights: dict[str, Any] | None = None
    format: _Format | None = None


class CompressedTensors(Method):
    """The settings of compressed-tensors."""

    ignored = frozenset(("global_compression_ratio", "version"))

    quant_method: Literal["compressed-tensors"]
    format: _Format | Literal["mixed-precision"]
    config_groups: dict[str, dict[str, Any]] = Field(min_length=1)
    ignore: Names = ()
    # How far the program that wrote the file had come; with both, weights are stored quantised.
    quantization_status: Literal["compressed", "frozen"] = "compressed"
    sparsity_config: dict[str, Any] = Field(default_factory=dict)
    kv_cache_scheme: Any = None

    def weight_format(self) -> WeightFormat:
        if self.sparsity_config.get("format", "dense") != "dense":
            raise UnsupportedModel(
                "config.json: quantization_config.sparsity_config.format "
                f"{str(self.sparsity_config['format'])[:80]!r} is not supported, only 'dense' is"
            )
        groups = [_Group.read(group) for group in self.config_groups.values()]
        forms = tuple(
            self._form(group, _WeightArgs.read(group.weights)) for group in groups if group.weights
        )
        has_outputs = any(group.get("output_activations") for group in self.config_groups.values())
        notes = (KV_NOTE,) if self.kv_cache_scheme or has_outputs else ()
        return WeightFormat(forms, self.ignore, notes)

    def _form(self, group: _Group, weights: _WeightArgs) -> MatrixFormat:
        name = group.format or self.format
        stored = next((s for s in _FORMATS.get(name, ()) if s.type == weights.type), None)
        if stored is None:
            raise UnsupportedModel(
                f"config.json: quantization_config.format {name!r} of {weights.type} weights is "
                "not supported"
            )
        if weights.num_bits not in stored.bits:
            raise UnsupportedModel(
                f"config.json: quantization_config: weights.num_bits {weights.num_bits} is not "
                f"one of {list(stored.bits)}, which {name!r} may have"
            )
        if stored.layout == "packed" and not weights.symmetric and weights.block() == (None, None):
            raise ValueError("packed weights of one zero point")
        if stored.layout in ("nvfp4_packed", "mxfp4_packed") and not weights.symmetric:
            raise ValueError(f"{name!r} with zero points")
        return MatrixFormat(
            layout=stored.layout,
            bits=weights.num_bits,
            is_float=weights.type == "float",
            block=weights.block(),
            has_zeros=not weights.symmetric,
            order="required" if weights.actorder in ("group", "dynamic", True) else "stored",
            targets=group.targets,
        )
