"""Looks up tokens in one rank's share of an embedding table on a GPU, in one launch.

Each row is read once and written once: 4 * size bytes per token in bfloat16. For the tokens of
other ranks the launch writes zeros and reads no row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of a row that a program copies


@triton.jit(do_not_specialize=["first", "n_rows"])
def _embedding(
    table, token_ids, out, first, n_rows, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < SIZE
    row = tl.load(token_ids + token).to(tl.int64) - first
    is_here = (row >= 0) & (row < n_rows)
    found = tl.load(table + row * row_stride + column, is_there & is_here, 0.0)
    tl.store(out + token * SIZE + column, found, is_there)


def embedding(table: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """Looks up tokens, as `Ops.embedding` describes. The elements of a row of `table` must be
    contiguous."""
    n_rows, size = table.shape
    n_tokens = len(token_ids)
    out = torch.empty((n_tokens, size), dtype=table.dtype, device=table.device)
    _embedding[(n_tokens, triton.cdiv(size, _BLOCK))](
        table,
        token_ids.contiguous(),
        out,
        first,
        n_rows,
        table.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
