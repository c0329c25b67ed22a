"""How the matrices of a quantised checkpoint are stored, in our words.

`quantization_config.py` reads it from `config.json`; `quantised` has the arithmetic.
Knows no files and no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Layout = Literal["gptq", "awq", "packed", "scaled"]

EVERY_MATRIX = "Linear"
"""The target that means the matrices of all layers."""

_PATTERN = "re:"  # in front of a target that is a regular expression


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """The form of some of the matrices [n_out, n_in]: whole numbers or FP8, and their scales."""

    layout: Layout
    bits: Literal[4, 8]
    # Outputs and inputs that share a scale; None: all of them do.
    block: tuple[int | None, int | None]
    has_zeros: bool = False  # numbers are stored with the zero point of each scale
    zero_offset: int = 0  # is added to the zero points that are stored
    needs_order: bool = False  # the file says of each input which scale it has
    scale_name: str = "weight_scale"  # of layout "scaled"
    targets: tuple[str, ...] = (EVERY_MATRIX,)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The forms of a checkpoint's matrices; the first whose targets name a module is its form."""

    forms: tuple[MatrixFormat, ...]
    ignored: tuple[str, ...] = ()  # modules that are not quantised

    def of(self, module: str) -> MatrixFormat | None:
        """Returns the form of a module's matrix; None if that is not quantised."""
        if _names(self.ignored, module):
            return None
        for form in self.forms:
            if EVERY_MATRIX in form.targets or _names(form.targets, module):
                return form
        return None


def check_targets(targets: Iterable[str]) -> None:
    """Raises ValueError for a regular expression that is none."""
    for target in targets:
        if target.startswith(_PATTERN):
            try:
                re.compile(target.removeprefix(_PATTERN))
            except re.error as error:
                raise ValueError(f"{target[:80]!r} is no regular expression: {error}") from error


def _names(targets: Iterable[str], module: str) -> bool:
    """Whether a target is the module's name, whole names in it, or an expression it begins with."""
    for target in targets:
        if target.startswith(_PATTERN):
            if re.match(target.removeprefix(_PATTERN), module):
                return True
        elif f".{target}." in f".{module}.":
            return True
    return False
