"""Root-mean-square and layer normalisation on a GPU; each row is read once and written once.

A program holds one long row, or several short rows (the heads of queries and keys), in registers.
So memory is read only once for both the sum and the scaling: 4 * size bytes per row in bfloat16 are
read or written. The 4 * size operations of the root-mean-square norm, or 7 * size of the layer
norm, take less time than these accesses. The weight stays in the cache. Numbers are float32, and
the result is rounded once. The variance of a layer norm is computed after the mean is subtracted,
so that a mean far from zero does not reduce the precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.rows import row_form, rows_of


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm(
    x,
    weight,
    out,
    n_rows,
    n_inner,
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    is_there = (row < n_rows)[:, None] & (column < SIZE)[None, :]
    begin = row // n_inner * outer_stride + row % n_inner * inner_stride
    wide = tl.load(x + begin[:, None] + column[None, :], is_there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)  # [ROWS]
    factor = tl.load(weight + column, column < SIZE, 0.0).to(tl.float32)
    result = wide * scale[:, None] * factor[None, :]
    tl.store(out + row[:, None] * SIZE + column[None, :], result, is_there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises rows by their root mean square, as `Ops.rms_norm` describes."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    rows = rows_of(x)
    n, padded, n_warps = row_form(size)
    _rms_norm[(triton.cdiv(rows.n_rows, n),)](
        rows.x,
        weight,
        out,
        rows.n_rows,
        rows.n_inner,
        rows.outer_stride,
        rows.inner_stride,
        eps,
        SIZE=size,
        ROWS=n,
        PADDED=padded,
        num_warps=n_warps,
    )
    return out


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm(
    x,
    weight,
    bias,
    out,
    n_rows,
    n_inner,
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    is_there = (row < n_rows)[:, None] & is_column[None, :]
    begin = row // n_inner * outer_stride + row % n_inner * inner_stride
    wide = tl.load(x + begin[:, None] + column[None, :], is_there, 0.0).to(tl.float32)
    mean = tl.sum(wide, 1) / SIZE  # [ROWS]
    centred = tl.where(is_column[None, :], wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / SIZE + eps)
    factor = tl.load(weight + column, is_column, 0.0).to(tl.float32)
    shift = tl.load(bias + column, is_column, 0.0).to(tl.float32)
    result = centred * scale[:, None] * factor[None, :] + shift[None, :]
    tl.store(out + row[:, None] * SIZE + column[None, :], result, is_there)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Applies layer normalisation to rows, as `Ops.layer_norm` describes."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    rows = rows_of(x)
    n, padded, n_warps = row_form(size)
    _layer_norm[(triton.cdiv(rows.n_rows, n),)](
        rows.x,
        weight,
        bias,
        out,
        rows.n_rows,
        rows.n_inner,
        rows.outer_stride,
        rows.inner_stride,
        eps,
        SIZE=size,
        ROWS=n,
        PADDED=padded,
        num_warps=n_warps,
    )
    return out
