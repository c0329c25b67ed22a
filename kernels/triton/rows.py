"""Describes the rows of a tensor for kernels that compute over the last dimension."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor

# Number of elements that a warp holds in registers, and maximum number of warps of a program.
_WARP_ELEMENTS = 512
_MAX_WARPS = 16

# Number of elements of a program whose rows are short.
_MIN_ELEMENTS = 2048


class TensorRows(NamedTuple):
    """The layout of the rows of a tensor `x`. Row r begins at the element `r // n_inner *
    outer_stride + r % n_inner * inner_stride` and is contiguous."""

    x: Tensor
    n_rows: int
    n_inner: int
    outer_stride: int
    inner_stride: int


def rows_of(x: Tensor) -> TensorRows:
    """Returns the layout of the rows of `x` [..., size]. If `TensorRows` cannot describe these
    rows, returns the layout of a contiguous copy."""
    if x.dim() == 2 and x.stride(1) == 1:
        return TensorRows(x, x.shape[0], 1, x.stride(0), 0)
    if x.dim() == 3 and x.stride(2) == 1:
        return TensorRows(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
    x = x.contiguous()
    size = x.shape[-1]
    return TensorRows(x, x.numel() // size, 1, size, 0)


@cache
def row_form(size: int) -> tuple[int, int, int]:
    """Returns the launch parameters for a kernel over rows of `size` elements: the number of rows
    per program, the padded number of elements of a row, and the number of warps per program."""
    padded = triton.next_power_of_2(size)
    n_rows = max(1, _MIN_ELEMENTS // padded)
    return n_rows, padded, min(_MAX_WARPS, max(1, n_rows * padded // _WARP_ELEMENTS))
