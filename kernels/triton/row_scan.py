"""Reads a whole row of logits: once for the largest logits, and once more to gather candidates.

The lanes of a program read the logits of a row in turn. From the largest logit of each lane a bound
is derived: at least the wanted number of logits, and not many more, are greater than or equal to
this bound (they *reach* it).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.logits import load_block, order_of, value_of, weight_of, whole_weight


@triton.jit
def find_largest(row, N, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Returns the largest logit of each lane, the largest logit of the row, and the first token
    with that logit. The token is -1 if the row has a NaN or an infinity."""
    lane = tl.arange(0, LANES)
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    starts = tl.zeros((LANES,), tl.int32)  # the start of the block of each lane's peak
    is_bad = tl.zeros((LANES,), tl.int32)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        value = load_block(row, start, N, LANES)
        is_bad |= ((start + lane < N) & ((tl.abs(value) < float("inf")) == 0)).to(tl.int32)
        is_better = value > peaks  # of equal logits the first one stays
        peaks = tl.where(is_better, value, peaks)
        starts = tl.where(is_better, start, starts)
    largest = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == largest, starts + lane, 0x7FFFFFFF), 0)
    return peaks, largest, tl.where(tl.max(is_bad, 0) > 0, -1, token)


@triton.jit
def bound_for(peaks, largest, n_wanted, SHIFT: tl.constexpr):
    """Returns a lower bound for the `n_wanted` largest logits. At least `n_wanted` lanes have a
    peak (largest logit) that reaches the bound, and more lanes only if peaks are equal."""
    low, high = order_of(tl.min(peaks, 0), SHIFT), order_of(largest, SHIFT) + 1
    n_reached = n_wanted + 1
    while (high - low > 1) & (n_reached != n_wanted):
        middle = (low + high) >> 1
        n = tl.sum((peaks >= value_of(middle, SHIFT)).to(tl.int32), 0)
        is_enough = n >= n_wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        n_reached = tl.where(is_enough, n, n_reached)
    return value_of(low, SHIFT)


@triton.jit
def gather(
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
        value = load_block(row, start, N, LANES)
        is_found = (value >= bound) & (value > float("-inf"))
        n_here = tl.sum(is_found.to(tl.int32), 0)
        if n_here > 0:
            places = n_found + tl.cumsum(is_found.to(tl.int32), 0) - 1
            has_room = is_found & (places < ROOM)
            tl.store(values + places, value, has_room)
            tl.store(ids + places, start + tl.arange(0, LANES), has_room)
        n_found += n_here
        if needs_total:
            total += whole_weight(weight_of(value, largest, scale))
    tl.debug_barrier()  # threads read next what other threads have written
    return n_found, tl.sum(total, 0)
