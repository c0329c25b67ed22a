"""Combines the results of queries whose keys are divided among several items of work
(`attention_plan`).

Each item has a part of the keys, and has written its float32 result and the log, in base 2, of its
sum of weights. A launch with one program per head and token adds up the parts (Dao et al.,
Flash-Decoding, 2023). The sink of a head is added to the sum of weights after all keys of a row.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention_plan import N_DIVIDED_COLUMNS, DividedColumn

# The columns of the table of divided tokens, as constants for kernels.
_DIVIDED_ROW = tl.constexpr(DividedColumn.ROW.value)
_DIVIDED_PART = tl.constexpr(DividedColumn.PART.value)
_DIVIDED_STEP = tl.constexpr(DividedColumn.STEP.value)
_DIVIDED_N_PARTS = tl.constexpr(DividedColumn.N_PARTS.value)
_DIVIDED_STRIDE = tl.constexpr(N_DIVIDED_COLUMNS)

# A number below every score. It is finite so that the difference of two of them is 0, not NaN.
NO_PEAK = tl.constexpr(-1e30)

# Number of parts of a token that a step of `_combine_kernel` combines.
_N_PARTS = 16

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def sink_weights(sinks, peaks):
    """Returns the weights of sinks, relative to the weight 1 of the key with the score `peaks`.

    Weights are limited to 2^126. Compared with such a weight, the weights of keys are negligible.
    """
    return tl.exp2(tl.minimum(tl.load(sinks) * _LOG2_E - peaks, 126.0))


@triton.jit
def _combine_kernel(
    out,
    parts,
    log_sums,
    sinks,
    divided,
    HAS_SINKS: tl.constexpr,
    N_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Combines the partial results of one head of one token whose keys are divided among several
    items of work."""
    program = tl.program_id(0)
    head = program % N_HEADS
    token = divided + (program // N_HEADS) * _DIVIDED_STRIDE
    row = tl.load(token + _DIVIDED_ROW).to(tl.int64)
    first_part = tl.load(token + _DIVIDED_PART).to(tl.int64)
    step = tl.load(token + _DIVIDED_STEP)
    n_parts = tl.load(token + _DIVIDED_N_PARTS)
    dims = tl.arange(0, DIMS)
    is_dim = dims < VALUE_DIM
    total = tl.zeros((DIMS,), tl.float32)
    sum_ = tl.full((), 0.0, tl.float32)
    peak = tl.full((), NO_PEAK, tl.float32)
    for begin in tl.range(0, n_parts, PARTS):
        places = begin + tl.arange(0, PARTS)
        part_rows = (first_part + places * step) * N_HEADS + head
        logs = tl.load(log_sums + part_rows, mask=places < n_parts, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(logs - new_peak)
        wheres = parts + part_rows[:, None] * VALUE_DIM + dims[None, :]
        is_stored = (places < n_parts)[:, None] & is_dim[None, :]
        values = tl.load(wheres, mask=is_stored, other=0.0)  # [PARTS, DIMS]
        total = total * shrink + tl.sum(weights[:, None] * values, 0)
        sum_ = sum_ * shrink + tl.sum(weights, 0)
        peak = new_peak
    if n_parts > 0:
        if HAS_SINKS:
            sum_ += sink_weights(sinks + head, peak)
        where = out + (row * N_HEADS + head) * VALUE_DIM + dims
        tl.store(where, (total / sum_).to(out.dtype.element_ty), mask=is_dim)


def combine_parts(
    out: Tensor, parts: Tensor, log_sums: Tensor, sinks: Tensor | None, divided: Tensor
) -> None:
    """Writes the attention of the tokens in the table `divided` to the rows of these tokens in
    `out` [n_tokens, n_heads, value_dim].

    `parts` [n_part_rows, n_heads, value_dim] has the results for parts of the keys, and `log_sums`
    [n_part_rows, n_heads] has the logs of the sums of weights of these parts.
    """
    _, n_heads, value_dim = out.shape
    _combine_kernel[(len(divided) * n_heads,)](
        out,
        parts,
        log_sums,
        log_sums if sinks is None else sinks,
        divided,
        HAS_SINKS=sinks is not None,
        N_HEADS=n_heads,
        VALUE_DIM=value_dim,
        DIMS=max(16, triton.next_power_of_2(value_dim)),
        PARTS=_N_PARTS,
        num_warps=2,
    )
