"""How the matrices of a quantised checkpoint are stored, independent of the quantisation method.

`quantization_config/` reads this format from `config.json`; `quantised/` has the code that
dequantises. This module knows no files and no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Layout = Literal[
    "gptq", "awq", "packed", "scaled", "int8_rows", "blockwise",
    "nvfp4", "nvfp4_packed", "mxfp4_packed", "mlx", "mlx_nvfp4", "mlx_mxfp4",
]  # fmt: skip
"""A layout in which files store the tensors of a matrix. `quantised/find.py` has the class for each
layout."""

Bits = Literal[2, 3, 4, 5, 6, 8]

Order = Literal["neighbours", "stored", "required"]
"""Which inputs share a scale. "neighbours": always neighbouring inputs. "stored": the inputs that a
tensor of the file says, or neighbours if the tensor is missing. "required": the inputs that this
tensor says; it must exist."""

EVERY_MATRIX = "Linear"
"""The target that matches the matrices of all linear layers."""

_PATTERN = "re:"  # prefix of a target that is a regular expression


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """The format of the matrices that `targets` name. Each matrix [n_out, n_in] has quantised
    numbers (integers or FP8) and scales."""

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


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The formats of a checkpoint's matrices, each with targets that name modules.

    The format of a module is the first one with the module's name as a target. If there is none, it
    is the first one with a target that is a regular expression and matches the name. Otherwise it
    is the first one for every matrix.
    """

    forms: tuple[MatrixFormat, ...]
    ignored: tuple[str, ...] = ()  # modules that are not quantised
    notes: tuple[str, ...] = ()  # what a user should know about how the weights are read

    def of(self, module: str) -> MatrixFormat | None:
        """Returns the format of the matrix of `module`, or None if the matrix is not quantised."""
        if _is_named(self.ignored, module) or _is_matched(self.ignored, module):
            return None
        for is_meant in (_is_named, _is_matched, _is_any):
            for form in self.forms:
                if is_meant(form.targets, module):
                    return form
        return None


def check_targets(targets: Iterable[str]) -> None:
    """Raises ValueError for a target that is an invalid regular expression."""
    for target in targets:
        if target.startswith(_PATTERN):
            try:
                re.compile(target.removeprefix(_PATTERN))
            except re.error as error:
                raise ValueError(f"{target[:80]!r} is no regular expression: {error}") from error


def _is_named(targets: Iterable[str], module: str) -> bool:
    """Returns whether a target occurs in the module's name as one or more whole parts between
    dots."""
    return any(f".{target}." in f".{module}." for target in targets)


def _is_matched(targets: Iterable[str], module: str) -> bool:
    """Returns whether a target that begins with `re:` matches the beginning of the module's
    name."""
    patterns = (each.removeprefix(_PATTERN) for each in targets if each.startswith(_PATTERN))
    return any(re.match(pattern, module) for pattern in patterns)


def _is_any(targets: Iterable[str], module: str) -> bool:
    """Returns whether a target stands for the matrices of all linear layers."""
    return EVERY_MATRIX in targets
