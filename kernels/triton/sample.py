"""Chooses tokens from logits on a GPU, with one launch for a batch and one program for each row.

The filters are those of `Ops.sample`, but no row is sorted. A filter is a threshold: the largest
value for which enough logits are at or above the value. For `top_k`, "enough" is a number of
logits; for `top_p`, it is a sum of weights. The threshold is found by bisection over the bit
patterns of the logits, which have the order of their values, so it is exact. Of the logits that are
equal to the threshold, only the first ones are kept, up to the number that is needed.

    look       reads the row once: the largest logit of each lane of the program, and of the row.
               A greedy row is finished with this step.
    gather     reads the row again if it has a limit, and writes the logits that reach a bound. With
               `top_k` the bound is the `top_k`-th largest of the lanes' maxima: all of the `top_k`
               largest logits reach it, and few others. With `top_p` alone the bound is the median
               of the maxima, which a few thousand logits reach. If the gathered logits suffice, the
               next steps read no others.
    threshold  bisects: at most 16 steps for bfloat16 and 32 for float32, usually half of that.
    invert     sums the weights of all blocks, then reads the block that contains the target.

A greedy row is thus read once, and any other row twice: 2 * vocab_size elements, the second time
mostly from the cache. If the gathered logits do not suffice, each step of the bisection reads the
whole row. This happens for a `top_k` above half of the number of lanes, for a `top_p` that keeps
thousands of tokens, and if most logits are equal. A batch with adjusted rows or banned tokens is
copied to float32 first.

Weights are integers of 64 bits, in units of 2^-44 of the largest weight. Their sums are exact in
any order, so a token never depends on the shape of the launch. Weights differ from those of
`Ops.sample` by the rounding of the exponential, a relative error of some 2^-24, and by the rounding
to 2^-44. `top_k` therefore keeps the same tokens, and results differ only if the random number,
`top_p` or `min_p` is that close to a border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.sampling_columns import SamplingColumns
from kernels.pytorch.adjust import BANNED, MAX_TEMPERATURE, adjust
from kernels.triton.greedy import greedy
from kernels.triton.penalize import penalize

_MAX_TEMPERATURE = tl.constexpr(MAX_TEMPERATURE)

# Number of lanes of a program: the number of logits of a block.
_N_LANES = 4096

_N_WARPS = 16

# Number of blocks of logits that are loaded at the same time.
_N_STAGES = 4

# Number of low bits that are zero in every value of a type that is converted to float32.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _order_of(value, SHIFT: tl.constexpr):
    """Maps the float32 numbers `value` to integers with the same order. The SHIFT lowest bits of
    `value` must be zero."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 is 0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order >> SHIFT).to(tl.int64)


@triton.jit
def _value_of(order, SHIFT: tl.constexpr):
    """Converts integers from `_order_of` back to float32 numbers."""
    low_bits = tl.where(order < 0, (1 << SHIFT) - 1, 0)
    order = ((order << SHIFT) + low_bits).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(value, largest, scale):
    """Returns the weights of logits relative to the largest. `scale` is log2(e) / temperature."""
    return tl.exp2((value - largest) * scale)


@triton.jit
def _whole(weight):
    return (weight * 17592186044416.0).to(tl.int64)  # 2^44: the sum of 2^18 weights fits 64 bits


@triton.jit
def _load(row, start, N, LANES: tl.constexpr):
    """Loads a block of a row as float32, with -inf past the end of the row."""
    places = start + tl.arange(0, LANES)
    return tl.load(row + places, places < N, float("-inf")).to(tl.float32)


@triton.jit
def _look(row, N, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Returns the largest logit of each lane, the largest logit of the row, and the first token
    with that logit. The token is -1 if the row has a NaN or an infinity."""
    lane = tl.arange(0, LANES)
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    starts = tl.zeros((LANES,), tl.int32)  # the start of the block of each lane's peak
    is_bad = tl.zeros((LANES,), tl.int32)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        value = _load(row, start, N, LANES)
        is_bad |= ((start + lane < N) & ((tl.abs(value) < float("inf")) == 0)).to(tl.int32)
        is_better = value > peaks  # of equal logits the first one stays
        peaks = tl.where(is_better, value, peaks)
        starts = tl.where(is_better, start, starts)
    largest = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == largest, starts + lane, 0x7FFFFFFF), 0)
    return peaks, largest, tl.where(tl.max(is_bad, 0) > 0, -1, token)


@triton.jit
def _bound(peaks, largest, n_wanted, SHIFT: tl.constexpr):
    """Returns a lower bound for the `n_wanted` largest logits. At least `n_wanted` lanes have a
    peak (largest logit) that reaches the bound, and more lanes only if peaks are equal."""
    low, high = _order_of(tl.min(peaks, 0), SHIFT), _order_of(largest, SHIFT) + 1
    n_reached = n_wanted + 1
    while (high - low > 1) & (n_reached != n_wanted):
        middle = (low + high) >> 1
        n = tl.sum((peaks >= _value_of(middle, SHIFT)).to(tl.int32), 0)
        is_enough = n >= n_wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        n_reached = tl.where(is_enough, n, n_reached)
    return _value_of(low, SHIFT)


@triton.jit
def _gather(
    row,
    N,
    bound,
    largest,
    scale,
    needs_total,
    values,
    ids,
    LANES: tl.constexpr,
    ROOM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes the values and ids of the first ROOM logits that reach `bound`, in the order of their
    ids.

    Returns the number of logits that reach `bound`, and the weight of the whole row if
    `needs_total`.
    """
    n_found = tl.full((), 0, tl.int32)
    total = tl.zeros((LANES,), tl.int64)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        value = _load(row, start, N, LANES)
        is_found = (value >= bound) & (value > float("-inf"))
        n_here = tl.sum(is_found.to(tl.int32), 0)
        if n_here > 0:
            places = n_found + tl.cumsum(is_found.to(tl.int32), 0) - 1
            has_room = is_found & (places < ROOM)
            tl.store(values + places, value, has_room)
            tl.store(ids + places, start + tl.arange(0, LANES), has_room)
        n_found += n_here
        if needs_total:
            total += _whole(_weight_of(value, largest, scale))
    tl.debug_barrier()  # threads read next what other threads have written
    return n_found, tl.sum(total, 0)


@triton.jit
def _count(row, N, bound, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Returns the number of logits that are at least `bound`."""
    count = tl.zeros((LANES,), tl.int32)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        count += (_load(row, start, N, LANES) >= bound).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _weigh(
    row,
    N,
    bound,
    largest,
    scale,
    IS_ABOVE: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns the number and the weight of the logits that are at least `bound`, or above `bound`
    if IS_ABOVE."""
    count = tl.zeros((LANES,), tl.int32)
    weight = tl.zeros((LANES,), tl.int64)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        value = _load(row, start, N, LANES)
        is_in = value > bound if IS_ABOVE else value >= bound
        count += is_in.to(tl.int32)
        weight += tl.where(is_in, _whole(_weight_of(value, largest, scale)), 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _goal(top_p, total):
    """Returns the smallest integer that is at least `top_p * total`, limited to the range from 1 to
    `total`."""
    goal = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(goal, 1), total)


@triton.jit
def _limit_count(
    row,
    N,
    low,
    largest,
    scale,
    n_wanted,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Applies `top_k`. Returns a bound, the number of kept logits that are equal to the bound, and
    the weight of all kept logits.

    All logits above the bound are kept. At least `n_wanted` logits must reach `low`.
    """
    low, high = _order_of(low, SHIFT), _order_of(largest, SHIFT) + 1
    n_reached = n_wanted + 1
    while (high - low > 1) & (n_reached != n_wanted):
        middle = (low + high) >> 1
        n = _count(row, N, _value_of(middle, SHIFT), LANES, STAGES)
        is_enough = n >= n_wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        n_reached = tl.where(is_enough, n, n_reached)
    bound = _value_of(low, SHIFT)
    n_above, weight = _weigh(row, N, bound, largest, scale, True, LANES, STAGES)
    n_kept = (n_wanted - n_above).to(tl.int64)
    return bound, n_kept, weight + n_kept * _whole(_weight_of(bound, largest, scale))


@triton.jit
def _limit_weight(
    row,
    N,
    low,
    n_kept,
    largest,
    temperature,
    scale,
    goal,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Applies `top_p`. Returns a bound, and the number of kept logits that are equal to the bound.

    All logits above the bound are kept. The logits above `low`, together with the first `n_kept`
    logits equal to `low`, must have a weight of at least `goal`.
    """
    last = _order_of(low, SHIFT)
    # Logits below this have a weight of zero.
    low = tl.maximum(last, _order_of(largest - 32.0 * temperature, SHIFT))
    high = _order_of(largest, SHIFT) + 1
    n_low, n_high = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), 0, tl.int32)
    while (high - low > 1) & (n_low - n_high > 1):
        middle = (low + high) >> 1
        n, weight = _weigh(row, N, _value_of(middle, SHIFT), largest, scale, False, LANES, STAGES)
        is_enough = weight >= goal
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        n_low, n_high = tl.where(is_enough, n, n_low), tl.where(is_enough, n_high, n)
    bound = _value_of(low, SHIFT)
    _, weight = _weigh(row, N, bound, largest, scale, True, LANES, STAGES)
    each = tl.maximum(_whole(_weight_of(bound, largest, scale)), 1)
    n_missing = (tl.maximum(goal - weight, 0) + each - 1) // each
    return bound, tl.where(low == last, tl.minimum(n_kept, n_missing), n_missing)


@triton.jit
def _weigh_block(row, start, N, bound, n_kept, largest, scale, min_p, LANES: tl.constexpr):
    """Returns the weights of the logits of a block, and the number of logits equal to `bound`.

    Weights are zero for logits that are dropped: logits below `bound`, logits equal to `bound`
    after the first `n_kept` of them, and logits whose weight is below `min_p`.
    """
    value = _load(row, start, N, LANES)
    is_kept = value > bound
    n_equal = tl.full((), 0, tl.int32)
    if bound > float("-inf"):
        is_equal = value == bound
        n_equal = tl.sum(is_equal.to(tl.int32), 0)
        if n_equal > 0:
            is_kept |= is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= n_kept)
    weight = _weight_of(value, largest, scale)
    return tl.where(is_kept & (weight >= min_p), _whole(weight), 0), n_equal


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
    """Returns the sampled index of a row. `low` must be so low that the limits drop all logits
    below it."""
    bound, n_kept = low, tl.full((), 0x7FFFFFFF, tl.int64)
    if n_wanted <= N:
        bound, n_kept, total = _limit_count(
            row, N, low, largest, scale, n_wanted, SHIFT, LANES, STAGES
        )
    if top_p < 1.0:
        goal = _goal(top_p, total)
        bound, n_kept = _limit_weight(
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
    peaks, largest, token = _look(row, N, LANES, STAGES)
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
            low = _bound(peaks, largest, tl.minimum(n_wanted, LANES // 2), SHIFT)
            values, ids = found_values + program * ROOM, found_ids + program * ROOM
            n_found, total = _gather(
                row, N, low, largest, scale, has_only_top_p, values, ids, LANES, ROOM, STAGES
            )
            is_settled = n_found <= ROOM
            if is_settled & has_only_top_p:
                _, weight = _weigh(values, n_found, low, largest, scale, False, LANES, 1)
                is_settled = weight >= _goal(top_p, total)
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
    """Returns a float32 copy in which the logits of banned tokens are BANNED.

    NaNs and infinities stay unchanged, since they mark a row that cannot be sampled.
    """
    logits = logits.float()
    places = columns.banned_rows, columns.banned_ids
    banned = logits[places]
    return logits.index_put(places, banned.masked_fill(banned.isfinite(), BANNED))
