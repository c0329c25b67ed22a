"""Chooses tokens from logits on a GPU, with one launch for a batch and one program for each row.

The filters keep the same tokens as in `Ops.sample`, but no row is sorted. A row passes through four
steps:

    find       reads the row once: the largest logit of each lane of the program, and of the row.
               A greedy row is finished with this step (`row_scan.find_largest`).
    gather     reads the row again if it has `top_k` or `top_p`, and writes the logits that reach a
               bound. With `top_k` the bound is the `top_k`-th largest of the lanes' maxima: all of
               the `top_k` largest logits reach it, and few others. With `top_p` alone the bound is
               the median of the maxima, which a few thousand logits reach. If the gathered logits
               suffice, the next steps read no others (`row_scan.gather`).
    filter     finds the exact threshold of `top_k` or `top_p` by bisection (`filters`).
    invert     sums the weights of all blocks, then reads the block that contains the target.

A greedy row is thus read once, and any other row twice: 2 * vocab_size elements, the second time
mostly from the cache. If the gathered logits do not suffice, each step of the bisection reads the
whole row. This happens for a `top_k` above half of the number of lanes, for a `top_p` that keeps
thousands of tokens, and if most logits are equal. A batch with adjusted rows or banned tokens is
copied to float32 first.

Sums of weights are exact (`logits`), so a token never depends on the shape of the launch. Weights
differ from the weights in `Ops.sample` by the rounding of the exponential, a relative error of some
2^-24, and by the rounding to 2^-44. `top_k` therefore keeps the same tokens, and results differ
only if the random number, `top_p` or `min_p` is that close to a border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.sampling_columns import SamplingColumns
from kernels.pytorch.adjust import BANNED, MAX_TEMPERATURE, adjust
from kernels.triton.filters import goal_weight, limit_count, limit_weight, weigh
from kernels.triton.greedy import greedy
from kernels.triton.logits import load_block, weight_of, whole_weight
from kernels.triton.penalize import penalize
from kernels.triton.row_scan import bound_for, find_largest, gather

_MAX_TEMPERATURE = tl.constexpr(MAX_TEMPERATURE)

# Number of lanes of a program: the number of logits of a block.
_N_LANES = 4096

_N_WARPS = 16

# Number of blocks of logits that are loaded at the same time.
_N_STAGES = 4

# Number of low bits that are zero in every value of a type that is converted to float32.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _weigh_block(row, start, N, bound, n_kept, largest, scale, min_p, LANES: tl.constexpr):
    """Returns the weights of the logits of a block, and the number of logits equal to `bound`.

    Weights are zero for logits that are dropped: logits below `bound`, logits equal to `bound`
    after the first `n_kept` of them, and logits whose weight is below `min_p`.
    """
    value = load_block(row, start, N, LANES)
    is_kept = value > bound
    n_equal = tl.full((), 0, tl.int32)
    if bound > float("-inf"):
        is_equal = value == bound
        n_equal = tl.sum(is_equal.to(tl.int32), 0)
        if n_equal > 0:
            is_kept |= is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= n_kept)
    weight = weight_of(value, largest, scale)
    return tl.where(is_kept & (weight >= min_p), whole_weight(weight), 0), n_equal


@triton.jit
def _invert_cdf(
    row,
    N,
    bound,
    n_kept,
    largest,
    scale,
    min_p,
    uniform,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Returns the first index whose cumulative weight is above `uniform` times the total weight."""
    starts = LANES * tl.arange(0, BLOCKS)
    weights = tl.zeros((BLOCKS,), tl.int64)
    n_left = tl.zeros((BLOCKS,), tl.int64)  # the rest of n_kept at the start of each block
    for start in tl.range(0, N, LANES):
        n_left = tl.where(starts == start, n_kept, n_left)
        weight, n_equal = _weigh_block(row, start, N, bound, n_kept, largest, scale, min_p, LANES)
        weights = tl.where(starts == start, tl.sum(weight, 0), weights)
        n_kept -= n_equal
    total = tl.sum(weights, 0)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    is_before = tl.cumsum(weights, 0) <= target
    start = tl.sum(is_before.to(tl.int32), 0) * LANES
    n_kept = tl.sum(tl.where(starts == start, n_left, 0), 0)
    weight, _ = _weigh_block(row, start, N, bound, n_kept, largest, scale, min_p, LANES)
    target -= tl.sum(tl.where(is_before, weights, 0), 0)
    return start + tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)


@triton.jit
def _choose(
    row,
    N,
    low,
    total,
    largest,
    temperature,
    scale,
    n_wanted,
    top_p,
    min_p,
    uniform,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns the sampled index of a row. `low` must be so low that `top_k` and `top_p` drop all
    logits below it."""
    bound, n_kept = low, tl.full((), 0x7FFFFFFF, tl.int64)
    if n_wanted <= N:
        bound, n_kept, total = limit_count(
            row, N, low, largest, scale, n_wanted, SHIFT, LANES, STAGES
        )
    if top_p < 1.0:
        goal = goal_weight(top_p, total)
        bound, n_kept = limit_weight(
            row, N, bound, n_kept, largest, temperature, scale, goal, SHIFT, LANES, STAGES
        )
    return _invert_cdf(row, N, bound, n_kept, largest, scale, min_p, uniform, LANES, BLOCKS)


@triton.jit
def _sample(
    logits,
    tokens,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    found_values,
    found_ids,
    row_stride,
    N: tl.constexpr,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * row_stride
    peaks, largest, token = find_largest(row, N, LANES, STAGES)
    temperature = tl.load(temperatures + program)
    if (token >= 0) & (temperature > 0.0):
        # The inverse must be finite, and logits of BANNED must have a weight of zero.
        temperature = tl.minimum(tl.maximum(temperature, 1e-37), _MAX_TEMPERATURE)
        scale = 1.4426950408889634 / temperature
        top_k, top_p = tl.load(top_ks + program), tl.load(top_ps + program)
        min_p, uniform = tl.load(min_ps + program), tl.load(uniforms + program)
        has_top_k = (top_k > 0) & (top_k < N)
        n_wanted = tl.where(has_top_k, top_k, 0x7FFFFFFF).to(tl.int32)
        has_only_top_p = (top_p < 1.0) & (has_top_k == 0)
        total = tl.full((), 0, tl.int64)
        is_settled = tl.full((), 0, tl.int1)
        if (n_wanted <= LANES // 2) | has_only_top_p:
            low = bound_for(peaks, largest, tl.minimum(n_wanted, LANES // 2), SHIFT)
            values, ids = found_values + program * ROOM, found_ids + program * ROOM
            n_found, total = gather(
                row, N, low, largest, scale, has_only_top_p, values, ids, LANES, ROOM, STAGES
            )
            is_settled = n_found <= ROOM
            if is_settled & has_only_top_p:
                _, weight = weigh(values, n_found, low, largest, scale, False, LANES, 1)
                is_settled = weight >= goal_weight(top_p, total)
            if is_settled:
                place = _choose(
                    values,
                    n_found,
                    low,
                    total,
                    largest,
                    temperature,
                    scale,
                    n_wanted,
                    top_p,
                    min_p,
                    uniform,
                    SHIFT,
                    LANES,
                    BLOCKS,
                    1,
                )
                token = tl.load(ids + place)
        if is_settled == 0:
            token = _choose(
                row,
                N,
                tl.full((), float("-inf"), tl.float32),
                total,
                largest,
                temperature,
                scale,
                n_wanted,
                top_p,
                min_p,
                uniform,
                SHIFT,
                LANES,
                BLOCKS,
                STAGES,
            )
    tl.store(tokens + program, token.to(tl.int64))


def sample(logits: Tensor, columns: SamplingColumns, *, n_lanes: int = _N_LANES) -> Tensor:
    """Samples a token for each row of logits, as `Ops.sample` describes. The host does not wait for
    the device.

    `n_lanes`, a power of two, is the number of logits that a program reads in one step.
    """
    logits = adjust(logits, columns, penalize=penalize)
    if columns.is_greedy:
        return greedy(logits)
    if len(columns.banned_ids):
        logits = _without_banned(logits, columns)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    n_rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(n_rows, dtype=torch.int64, device=device)
    room = 2 * n_lanes if columns.any_limited else 0
    _sample[(n_rows,)](
        logits,
        tokens,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.uniform,
        torch.empty((n_rows, room), dtype=torch.float32, device=device),
        torch.empty((n_rows, room), dtype=torch.int32, device=device),
        logits.stride(0),
        N=vocab_size,
        SHIFT=_UNUSED_BITS[logits.dtype],
        LANES=n_lanes,
        ROOM=2 * n_lanes,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, n_lanes)),
        STAGES=_N_STAGES,
        num_warps=_N_WARPS,
    )
    return tokens


def _without_banned(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Returns a float32 copy of `logits` in which the logits of banned tokens are BANNED.

    NaNs and infinities stay unchanged, because they mark a row that cannot be sampled.
    """
    logits = logits.float()
    places = columns.banned_rows, columns.banned_ids
    banned = logits[places]
    return logits.index_put(places, banned.masked_fill(banned.isfinite(), BANNED))
