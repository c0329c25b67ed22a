"""The argmax of every row of logits on a GPU, in one pass over the logits.

A program passes over its part of a row. It keeps the largest logit of each of its lanes, and
whether any logit was a NaN or an infinity. Rows are few and long, so each row is divided among
several programs, and a second small launch chooses among their candidates. With a small vocabulary
a row has one program and the second launch is omitted. The cost is 2 bytes and 3 operations per
bfloat16 logit.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # number of lanes of a program

# Maximum number of programs of a row, a power of two, and the number of logits of a program of a
# row that is not too long for this number.
_MAX_PARTS = 32
_PART = 2 * _BLOCK


@triton.jit
def _first_of_largest(value, index, is_bad):
    """Returns the largest value of a block, the smallest index with this value, and whether the
    block has a NaN or an infinity."""
    largest = tl.max(value, 0)
    first = tl.min(tl.where(value == largest, index, 0x7FFFFFFF), 0)
    return largest, first, tl.max(is_bad, 0)


@triton.jit
def _greedy(
    logits,
    tokens,
    values,
    row_stride,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    N_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_index = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    is_bad = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, PART, BLOCK):
        index = part * PART + begin + lane
        is_there = index < SIZE
        value = tl.load(logits + row * row_stride + index, is_there, 0.0).to(tl.float32)
        is_bad |= (tl.abs(value) < float("inf")) == 0
        is_better = is_there & (value > best)  # of equal logits the first one stays
        best = tl.where(is_better, value, best)
        best_index = tl.where(is_better, index, best_index)
    value, index, any_bad = _first_of_largest(best, best_index, is_bad)
    index = tl.where(any_bad > 0, -1, index)
    place = row * N_PARTS + part
    tl.store(tokens + place, index.to(tl.int64))
    if N_PARTS > 1:
        tl.store(values + place, value)


@triton.jit
def _pick(part_tokens, values, tokens, N_PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = row * N_PARTS + tl.arange(0, N_PARTS)
    index = tl.load(part_tokens + place)
    is_bad = (index < 0).to(tl.int32)
    _, first, any_bad = _first_of_largest(tl.load(values + place), index, is_bad)
    tl.store(tokens + row, tl.where(any_bad > 0, -1, first))


@cache
def _parts(size: int) -> tuple[int, int]:
    """Returns the number of programs for a row of `size` logits, and the number of logits of each
    program."""
    n_parts = min(_MAX_PARTS, triton.next_power_of_2(triton.cdiv(size, _PART)))
    return n_parts, triton.cdiv(size, n_parts * _BLOCK) * _BLOCK


def greedy(logits: Tensor) -> Tensor:
    """Returns the argmax of each row of logits, as `Ops.greedy` describes."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    n_rows, size = logits.shape
    device = logits.device
    tokens = torch.empty(n_rows, dtype=torch.int64, device=device)
    n_parts, part = _parts(size)
    values = tokens  # a placeholder, unused if a row has one part
    found = tokens
    if n_parts > 1:
        found = torch.empty((n_rows, n_parts), dtype=torch.int64, device=device)
        values = torch.empty((n_rows, n_parts), dtype=torch.float32, device=device)
    _greedy[(n_rows, n_parts)](
        logits,
        found,
        values,
        logits.stride(0),
        SIZE=size,
        PART=part,
        N_PARTS=n_parts,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    if n_parts > 1:
        _pick[(n_rows,)](found, values, tokens, N_PARTS=n_parts, num_warps=1)
    return tokens
