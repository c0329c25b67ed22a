"""How the matrices of a quantised checkpoint are stored, independent of the quantisation method.

`quantization_config.py` reads this format from `config.json`; `quantised/` has the arithmetic. This
module knows no files and no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Layout = Literal["gptq", "awq", "packed", "scaled"]

EVERY_MATRIX = "Linear"
"""The target that stands for the matrices of all linear layers."""

_PATTERN = "re:"  # prefix of a target that is a regular expression


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """The format of some of the matrices [n_out, n_in]: quantised numbers (integers or FP8) and
    scales."""

    layout: Layout
    bits: Literal[4, 8]
    # Numbers of outputs and of inputs that share a scale; None: all of them share it.
    block: tuple[int | None, int | None]
    has_zeros: bool = False  # a zero point is stored for each scale
    zero_offset: int = 0  # number to add to stored zero points
    needs_order: bool = False  # the file has a tensor with the group of each input
    scale_name: str = "weight_scale"  # of layout "scaled"
    targets: tuple[str, ...] = (EVERY_MATRIX,)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The formats of a checkpoint's matrices. A module has the first format whose targets match its
    name."""

    forms: tuple[MatrixFormat, ...]
    ignored: tuple[str, ...] = ()  # modules that are not quantised

    def of(self, module: str) -> MatrixFormat | None:
        """Returns the format of a module's matrix; None if the matrix is not quantised."""
        if _names(self.ignored, module):
            return None
        for form in self.forms:
            if EVERY_MATRIX in form.targets or _names(form.targets, module):
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


def _names(targets: Iterable[str], module: str) -> bool:
    """Whether a target matches the module's name.

    A target that begins with `re:` is a regular expression that must match from the beginning of
    the name. Any other target must be one or more whole parts of the name, between dots.
    """
    for target in targets:
        if target.startswith(_PATTERN):
            if re.match(target.removeprefix(_PATTERN), module):
                return True
        elif f".{target}." in f".{module}.":
            return True
    return False
