"""The settings of MLX, which quantises matrices of linear layers, embeddings and routers.

The key in `config.json` is `quantization`. An entry under the name of a module has the module's own
settings, or says whether the module is quantised at all.
"""

from __future__ import annotations

from typing import Literal, Self

from services.worker.models.config import JsonObject
from services.worker.models.quantization_config.settings import Method, Settings
from services.worker.models.weight_format import (
    EVERY_MATRIX,
    Bits,
    Layout,
    MatrixFormat,
    WeightFormat,
)

_Mode = Literal["affine", "nvfp4", "mxfp4"]
_LAYOUTS: dict[_Mode, Layout] = {"affine": "mlx", "nvfp4": "mlx_nvfp4", "mxfp4": "mlx_mxfp4"}
_SIZES: dict[_Mode, tuple[int, ...]] = {"affine": (32, 64, 128), "nvfp4": (16,), "mxfp4": (32,)}


class _Form(Settings):
    """The number of bits and other settings of one module, or of all modules."""

    group_size: Literal[16, 32, 64, 128]
    bits: Bits
    mode: _Mode = "affine"

    def form(self, target: str) -> MatrixFormat:
        """Returns the format of the modules that `target` names."""
        if self.group_size not in _SIZES[self.mode]:
            raise ValueError(f"mode {self.mode} with groups of {self.group_size}")
        if self.mode != "affine" and self.bits != 4:
            raise ValueError(f"mode {self.mode} with {self.bits} bits")
        return MatrixFormat(
            layout=_LAYOUTS[self.mode],
            bits=self.bits,
            block=(1, self.group_size),
            has_zeros=self.mode == "affine",
            targets=(target,),
        )


class Mlx(Method):
    """The settings of MLX."""

    every: _Form
    own: dict[str, _Form | bool]

    @classmethod
    def read(cls, given: JsonObject) -> Self:
        own = {name: said for name, said in given.items() if isinstance(said, dict | bool)}
        every = {name: said for name, said in given.items() if name not in own}
        merged = {
            # As MLX reads them: a module with settings of its own has no mode unless it says so.
            name: {**every, "mode": "affine", **said} if isinstance(said, dict) else said
            for name, said in own.items()
        }
        return cls.model_validate({"every": every, "own": merged})

    def weight_format(self) -> WeightFormat:
        forms = [said.form(name) for name, said in self.own.items() if isinstance(said, _Form)]
        ignored = [name for name, said in self.own.items() if said is False]
        return WeightFormat((*forms, self.every.form(EVERY_MATRIX)), tuple(ignored))
