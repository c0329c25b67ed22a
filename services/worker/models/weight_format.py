"""Describes how the matrices of a quantised checkpoint are stored, independent of the quantisation
method.

`quantization_config/` reads this format from `config.json`; `quantised/` has the code that
dequantises. This module uses no files and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from services.worker.models.module_targets import ModuleTargets

Layout = Literal[
    "gptq", "awq", "packed", "scaled", "int8_rows", "blockwise",
    "nvfp4", "nvfp4_packed", "mxfp4_packed", "mlx", "mlx_nvfp4", "mlx_mxfp4",
]  # fmt: skip
"""A layout in which files store the tensors of a matrix. `quantised/find.py` has the class for each
layout."""

Bits = Literal[2, 3, 4, 5, 6, 8]

Order = Literal["stored", "required"]
"""Says how the group of each input is determined. The inputs of a group share a scale. "stored": a
tensor of the file has the group of each input; if it is missing, neighbouring inputs form groups.
"required": this tensor must exist."""

EVERY_MATRIX = "Linear"
"""The target that matches the matrices of all linear layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """The format of the matrices that `targets` name. Each matrix [n_out, n_in] has quantised
    numbers (integers, floats of few bits, or indices into a table) and scales."""

    layout: Layout
    bits: Bits
    # Numbers of outputs and of inputs that share a scale; None: all of them share it.
    block: tuple[int | None, int | None]
    has_zeros: bool = False  # a zero point is stored for each scale
    zero_offset: int = 0  # number to add to stored zero points
    order: Order = "stored"
    scale_name: str = "weight_scale"  # of layout "scaled"
    is_float: bool = False  # numbers of layout "scaled" are floats of 8 bits, and not whole
    targets: tuple[str, ...] = (EVERY_MATRIX,)


@dataclass(frozen=True)
class WeightFormat:
    """The formats of a checkpoint's matrices, each with targets that name modules.

    Modules in `ignored` have no format. Any other module has the first format with a target that is
    the name of the module or a part of this name (see `ModuleTargets`). If there is none, it has
    the first format with a target that is a regular expression and matches the name. Otherwise it
    has the first format with the target for every matrix, if there is one.
    """

    forms: tuple[MatrixFormat, ...]
    ignored: tuple[str, ...] = ()  # modules that are not quantised
    notes: tuple[str, ...] = ()  # what a user should know about how the weights are read

    def of(self, module: str) -> MatrixFormat | None:
        """Returns the format of a module's matrix, or None if the matrix is not quantised. Raises
        CannotStart if matching regular expressions takes too long."""
        if self._not_quantised.of(module) is not None:
            return None
        index = self._quantised.of(module)
        return self._for_every if index is None else self.forms[index]

    def check(self) -> None:
        """Raises ValueError if a target is a regular expression that is invalid or not
        supported."""
        _ = self._not_quantised, self._quantised

    @cached_property
    def _not_quantised(self) -> ModuleTargets:
        return ModuleTargets([self.ignored])

    @cached_property
    def _quantised(self) -> ModuleTargets:
        return ModuleTargets([form.targets for form in self.forms])

    @cached_property
    def _for_every(self) -> MatrixFormat | None:
        return next((form for form in self.forms if EVERY_MATRIX in form.targets), None)
