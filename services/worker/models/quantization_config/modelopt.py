"""The settings of NVIDIA's ModelOpt: NVFP4, or FP8 with one scale for a matrix or with a scale for
each output."""

from __future__ import annotations

import fnmatch
from typing import Any, Literal, Self

from pydantic import Field

from services.worker.models.config import JsonObject
from services.worker.models.quantization_config.settings import KV_NOTE, Method, Names, Settings
from services.worker.models.weight_format import EVERY_MATRIX, MatrixFormat, WeightFormat

_Algorithm = Literal["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"]


class _Own(Settings):
    """The settings of one module, in a checkpoint that combines several algorithms."""

    ignored = frozenset(("awq_block_size",))

    quant_algo: _Algorithm
    group_size: int = 16


class ModelOpt(Method):
    """The settings of ModelOpt."""

    # `config_groups` repeats the algorithm in the words of compressed-tensors.
    ignored = frozenset((
        "config_groups", "has_zero_point", "pre_quant_scale", "producer", "smoothquant_val",
    ))  # fmt: skip

    quant_method: Literal["modelopt", "modelopt_fp4", "modelopt_mixed"] = "modelopt"
    quant_algo: _Algorithm | Literal["MIXED_PRECISION"]
    group_size: int | None = Field(default=None, ge=1, le=1024)
    exclude_modules: Names = ()
    ignore: Names = ()
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: Any = None
    quantized_layers: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @classmethod
    def read(cls, given: JsonObject) -> Self:
        """Reads the settings of `given`. In `hf_quant_config.json`, most of them are nested one
        level deeper."""
        inner = given.get("quantization")
        outer = {key: value for key, value in given.items() if key != "quantization"}
        return super().read({**outer, **inner} if isinstance(inner, dict) else given)

    def weight_format(self) -> WeightFormat:
        names = tuple(_target(name) for name in (*self.exclude_modules, *self.ignore))
        has_kv = (self.kv_cache_quant_algo or "none").lower() != "none" or self.kv_cache_scheme
        notes = (KV_NOTE,) if has_kv else ()
        return WeightFormat(tuple(self._forms()), names, notes)

    def _forms(self) -> list[MatrixFormat]:
        if self.quant_algo != "MIXED_PRECISION":
            return [_form(self.quant_algo, self.group_size or 16, EVERY_MATRIX)]
        own = {name: _Own.read(said) for name, said in self.quantized_layers.items()}
        return [
            _form(said.quant_algo, said.group_size, _target(name)) for name, said in own.items()
        ]


def _form(algorithm: _Algorithm, group_size: int, target: str) -> MatrixFormat:
    if algorithm == "NVFP4":
        if group_size != 16:
            raise ValueError(f"NVFP4 with groups of {group_size}")
        return MatrixFormat(layout="nvfp4", bits=4, block=(1, 16), targets=(target,))
    outputs = None if algorithm == "FP8" else 1
    return MatrixFormat(
        layout="scaled", bits=8, block=(outputs, None), is_float=True, targets=(target,)
    )


def _target(name: str) -> str:
    """Converts a module's name to a target of `WeightFormat`. A name with the wildcards of a shell
    becomes "re:" and a regular expression."""
    return f"re:{fnmatch.translate(name)}" if set("*?[") & set(name) else name
