"""Linear layers on the CPU whose weights stay quantised, with a scale for each group of inputs.

`src/groups.h` describes the layout in memory. Weights are read from memory only once, in their
quantised form. There are two kinds of products. One converts each 32-bit word of quantised weights
to floats in registers. The other rounds inputs to int8 and sums products of whole numbers
(`src/rounded_inputs.h`). The form of the matrix determines the kind. Every build of the library has
both kinds, and the sums of whole numbers are equal in all builds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.native.call import ELEMENT, GATES, NO_GATE, declare
from kernels.native.library import library
from kernels.native.linear import (
    NativeGatedWeight,
    NativeInt8GatedWeight,
    NativeInt8Weight,
    NativeWeight,
)
from kernels.native.structs import GroupsStruct
from kernels.weights.groups import MULTIPLE, GroupedMatrix
from kernels.weights.linear import Gate

_BYTES_AT_ONCE = 1 << 24  # bytes of unpacked numbers that are packed at once
# A word of four-bit numbers has eight inputs: those in the lower halves of the bytes, and those in
# the upper halves.
_LOWER, _UPPER = [0, 4, 1, 5], [2, 6, 3, 7]


@dataclass(frozen=True, slots=True)
class _GroupFunctions:
    """The functions of the library for weights that are quantised in groups."""

    linear: Callable[..., None]
    rows: Callable[..., None]
    panel: int  # outputs of a panel


@cache
def _functions() -> _GroupFunctions | None:
    loaded = library()
    return None if loaded is None else functions_of(loaded)


def functions_of(loaded: ctypes.CDLL) -> _GroupFunctions:
    """Returns the functions of `loaded`, a build of the library, for weights that are quantised in
    groups."""
    return _GroupFunctions(
        declare(
            loaded,
            "linear_groups",
            "element x weights groups bias residual out n_tokens n_in n_out finish",
        ),
        declare(loaded, "groups_rows", "element weights groups indices out n n_in"),
        declare(loaded, "linear_panel", "")(),
    )


def has_groups() -> bool:
    """Returns whether the native library is available. Every build can multiply weights that are
    quantised in groups."""
    return _functions() is not None


def can_take(matrix: GroupedMatrix, dtype: torch.dtype) -> bool:
    """Returns whether `NativeGroupsWeight` can pack `matrix` for tokens of `dtype`."""
    size, n_in = matrix.form.size, matrix.shape[1]
    is_whole = size % MULTIPLE == 0 or matrix.form.n_groups(n_in) == 1
    return has_groups() and dtype in ELEMENT and is_whole and min(matrix.shape) > 0


def can_gate(matrix: GroupedMatrix, dtype: torch.dtype) -> bool:
    """Returns whether `NativeGroupsGatedWeight` can pack `matrix` [2 * n_out, n_in] for tokens of
    `dtype`. The gate's rows come first in the matrix."""
    functions = _functions()
    return (
        can_take(matrix, dtype) and functions is not None and matrix.shape[0] % functions.panel == 0
    )


@dataclass(frozen=True, slots=True)
class GroupPanels:
    """The quantised numbers, scales and offsets of a matrix, in the layout of the native
    library."""

    packed: Tensor  # [n_panels, n_groups, bytes of a group] uint8
    form: GroupsStruct

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: torch.dtype, panel: int) -> GroupPanels:
        """Packs a matrix for tokens of `dtype`, which also determines the type of the scales."""
        matrix = matrix.without_zeros().in_short_groups()
        scale_type = matrix.scale_type(dtype)
        n_numbers = 1 if matrix.offsets is None else 2  # the scale, and the offset if there is one
        group_bytes = panel * (
            n_numbers * scale_type.itemsize + matrix.form.size * matrix.form.bits // 8
        )
        n_out, n_in = matrix.shape
        shape = -(-n_out // panel), matrix.form.n_groups(n_in), group_bytes
        packed = torch.empty(shape, dtype=torch.uint8)
        n_panels = max(1, _BYTES_AT_ONCE // (n_in * panel))
        for first in range(0, len(packed), n_panels):
            rows = matrix.rows(slice(first * panel, (first + n_panels) * panel))
            columns = [_in_panels(rows.scales, scale_type, panel)]
            if rows.offsets is not None:
                columns.append(_in_panels(rows.offsets, scale_type, panel))
            columns.append(_words_in_panels(rows, panel))
            torch.cat(columns, 2, out=packed[first : first + n_panels])
        form = GroupsStruct(
            matrix.form.bits,
            matrix.form.size,
            scale_type.itemsize,
            matrix.offsets is not None,
            matrix.form.rounds_inputs,
            matrix.form.values,
        )
        return cls(packed, form)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def form_address(self) -> int:
        """The address of the structure `form`. It is valid as long as this object lives."""
        return ctypes.addressof(self.form)


@dataclass(frozen=True, slots=True)
class NativeGroupsWeight:
    """A matrix that is quantised in groups of inputs; implements
    `kernels.weights.linear.TableWeight`.

    Products take float32 or bfloat16, and a bias and a residual of the same type. Rows that are
    looked up are of `dtype`.
    """

    panels: GroupPanels
    shape: tuple[int, int]
    dtype: torch.dtype
    functions: _GroupFunctions

    @classmethod
    def of(
        cls, matrix: GroupedMatrix, dtype: torch.dtype, /, functions: _GroupFunctions | None = None
    ) -> NativeGroupsWeight:
        """Packs a matrix for tokens of `dtype`. `can_take` must be true for the matrix."""
        functions = functions or _needed_functions()
        panels = GroupPanels.of(matrix, dtype, functions.panel)
        return cls(panels, matrix.shape, dtype, functions)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        n_out = self.shape[0]
        out = x.new_empty(x.shape[0], n_out)
        _linear(self.functions, x, self.panels, bias, residual, out, shape=self.shape, gate=NO_GATE)
        return out  # [n_tokens, n_out]

    def rows(self, indices: Tensor) -> Tensor:
        """Returns the rows of the matrix at `indices` [n], converted to `dtype`: [n, n_in].

        Raises:
            IndexError: the matrix has no row of one of the indices.
        """
        n_out, n_in = self.shape
        indices = indices.long().contiguous()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < n_out:
            raise IndexError(f"rows of a matrix of {n_out}")
        out = torch.empty(len(indices), n_in, dtype=self.dtype)
        self.functions.rows(
            ELEMENT[self.dtype],
            self.panels.packed.data_ptr(),
            self.panels.form_address,
            indices.data_ptr(),
            out.data_ptr(),
            len(indices),
            n_in,
        )
        return out


@dataclass(frozen=True, slots=True)
class NativeGroupsGatedWeight:
    """The gate and up matrices of a gated MLP in groups, with a fused gate function.

    The first half of the outputs of a panel belongs to the gate matrix, the second half to the up
    matrix.
    """

    panels: GroupPanels
    shape: tuple[int, int]  # 2 * n_out, n_in
    functions: _GroupFunctions
    gate: int

    @classmethod
    def of(
        cls,
        matrix: GroupedMatrix,
        dtype: torch.dtype,
        gate: Gate,
        /,
        functions: _GroupFunctions | None = None,
    ) -> NativeGroupsGatedWeight:
        """Packs a matrix for tokens of `dtype`. `can_gate` must be true for the matrix."""
        functions = functions or _needed_functions()
        half = functions.panel // 2
        beside = torch.arange(matrix.shape[0]).view(2, -1, half).transpose(0, 1).flatten()
        panels = GroupPanels.of(matrix.rows(beside), dtype, functions.panel)
        return cls(panels, matrix.shape, functions, GATES[gate])

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.shape[0] // 2)
        _linear(self.functions, x, self.panels, None, None, out, shape=self.shape, gate=self.gate)
        return out  # [n_tokens, n_out of each]


NativeLinear = NativeWeight | NativeInt8Weight | NativeGroupsWeight
"""A matrix that is packed for the library, in any form that the library supports."""

NativeGated = NativeGatedWeight | NativeInt8GatedWeight | NativeGroupsGatedWeight
"""Gate and up matrices that are packed for the library, with a fused gate function."""


def _needed_functions() -> _GroupFunctions:
    functions = _functions()
    if functions is None:
        raise ValueError("there is no native library")
    return functions


def _in_panels(numbers: Tensor, dtype: torch.dtype, panel: int) -> Tensor:
    """Reorders scales or offsets [n_out, n_groups] into panels, which are blocks of adjacent rows.
    Returns bytes [n_panels, n_groups, panel * itemsize]."""
    n_out, n_groups = numbers.shape
    whole = F.pad(numbers.to(dtype), (0, 0, 0, -n_out % panel))
    return whole.view(-1, panel, n_groups).transpose(1, 2).contiguous().view(torch.uint8)


def _words_in_panels(matrix: GroupedMatrix, panel: int) -> Tensor:
    """Reorders the quantised numbers of a matrix into panels, which are blocks of adjacent rows.
    Returns bytes [n_panels, n_groups, bytes of the words of a group]."""
    form, (n_out, n_in) = matrix.form, matrix.shape
    n_groups, per_word = form.n_groups(n_in), 32 // form.bits
    whole = F.pad(matrix.numbers, (0, n_groups * form.size - n_in, 0, -n_out % panel))
    inputs = whole.view(-1, panel, n_groups, form.size // per_word, per_word)
    if form.bits == 4:
        inputs = inputs[..., _LOWER] | inputs[..., _UPPER] << 4
    words: Any = inputs.permute(0, 2, 3, 1, 4).contiguous()
    return words.view(torch.uint8).flatten(2)  # type: ignore[no-any-return]


def _linear(
    functions: _GroupFunctions,
    x: Tensor,
    panels: GroupPanels,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    shape: tuple[int, int],
    gate: int,
) -> None:
    n_out, n_in = shape
    if x.shape[1] != n_in:
        raise ValueError(f"inputs {list(x.shape)} for a weight of {n_in} inputs")
    for other in (bias, residual):
        if other is not None and other.dtype != x.dtype:
            raise ValueError(f"{x.dtype} and {other.dtype} in one product")
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    functions.linear(
        ELEMENT[x.dtype],
        x.data_ptr(),
        panels.packed.data_ptr(),
        panels.form_address,
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        *x.shape,
        n_out,
        gate,
    )
