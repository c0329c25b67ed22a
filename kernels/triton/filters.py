"""The filters `top_k` and `top_p` as thresholds of a row of logits, without sorting the row.

A threshold is the largest value for which enough logits are at or above the value. For `top_k`,
"enough" is a number of logits; for `top_p`, it is a sum of weights. A bisection over the bit
patterns of the logits finds the threshold: at most 16 steps for bfloat16 and 32 for float32,
usually half of that. Each step reads the row once. Of the logits that are equal to the threshold,
only the first ones are kept, up to the number that is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.logits import load_block, order_of, value_of, weight_of, whole_weight


@triton.jit
def count_from(row, N, bound, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Returns the number of logits that are at least `bound`."""
    count = tl.zeros((LANES,), tl.int32)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        count += (load_block(row, start, N, LANES) >= bound).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def weigh(
    row,
    N,
    bound,
    largest,
    scale,
    IS_ABOVE: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns the number of logits that are at least `bound`, and the sum of their weights. With
    IS_ABOVE, only logits above `bound` count."""
    count = tl.zeros((LANES,), tl.int32)
    weight = tl.zeros((LANES,), tl.int64)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        value = load_block(row, start, N, LANES)
        is_in = value > bound if IS_ABOVE else value >= bound
        count += is_in.to(tl.int32)
        weight += tl.where(is_in, whole_weight(weight_of(value, largest, scale)), 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def goal_weight(top_p, total):
    """Returns the smallest integer that is at least `top_p * total`, limited to the range from 1 to
    `total`."""
    goal = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(goal, 1), total)


@triton.jit
def limit_count(
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

    All logits above the bound are kept. At least `n_wanted` logits must be at or above `low`.
    """
    low, high = order_of(low, SHIFT), order_of(largest, SHIFT) + 1
    n_reached = n_wanted + 1
    while (high - low > 1) & (n_reached != n_wanted):
        middle = (low + high) >> 1
        n = count_from(row, N, value_of(middle, SHIFT), LANES, STAGES)
        is_enough = n >= n_wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        n_reached = tl.where(is_enough, n, n_reached)
    bound = value_of(low, SHIFT)
    n_above, weight = weigh(row, N, bound, largest, scale, True, LANES, STAGES)
    n_kept = (n_wanted - n_above).to(tl.int64)
    return bound, n_kept, weight + n_kept * whole_weight(weight_of(bound, largest, scale))


@triton.jit
def limit_weight(
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
    last = order_of(low, SHIFT)
    # Logits below this have a weight of zero.
    low = tl.maximum(last, order_of(largest - 32.0 * temperature, SHIFT))
    high = order_of(largest, SHIFT) + 1
    n_low, n_high = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), 0, tl.int32)
    while (high - low > 1) & (n_low - n_high > 1):
        middle = (low + high) >> 1
        n, weight = weigh(row, N, value_of(middle, SHIFT), largest, scale, False, LANES, STAGES)
        is_enough = weight >= goal
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        n_low, n_high = tl.where(is_enough, n, n_low), tl.where(is_enough, n_high, n)
    bound = value_of(low, SHIFT)
    _, weight = weigh(row, N, bound, largest, scale, True, LANES, STAGES)
    each = tl.maximum(whole_weight(weight_of(bound, largest, scale)), 1)
    n_missing = (tl.maximum(goal - weight, 0) + each - 1) // each
    return bound, tl.where(low == last, tl.minimum(n_kept, n_missing), n_missing)
