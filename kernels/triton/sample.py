"""Chooses tokens from logits on a GPU: a row is one program, a batch one launch.

The filters are those of `Ops.sample`, and no row is sorted for them. A limit is a threshold:
the largest value that enough logits reach, counted for `top_k` and weighed for `top_p`. It is found
by bisection over the bit patterns of the logits, which are in the order of their values, so it is
exact; of the logits that equal it, the first few stay.

    look       passes once over the row: the largest logit of each lane of the program, and of all.
               A greedy row is done.
    gather     passes once more, if there is a limit: the logits that reach a bound. With `top_k`
               it is the `top_k`-th largest of the lanes' largest: none of the `top_k` lies below,
               and few others reach it. With `top_p` alone half of the lanes reach it, which leaves
               a few thousand logits. The next steps read these only, if they suffice.
    threshold  is the bisection: at most 16 steps for bfloat16 and 32 for float32, mostly half.
    invert     sums the weights of all blocks, then reads the one block that the target falls into.

So a greedy row is read once and every other one twice: 2 * vocab_size elements, the second time
mostly from the cache. If the gathered logits do not suffice, each step of the bisection reads the
whole row: for a `top_k` above half of the lanes, for a `top_p` that keeps thousands of tokens, and
where most logits are equal. A batch with adjusted rows or banned tokens is copied first, in
float32.

Weights are whole numbers of 2^-44 of the largest, in 64 bits, so sums are exact in any order, and a
token never depends on the shape of the launch. They differ from those of `Ops.sample` by the
rounding of the exponential, some parts of 2^24, and by anything below 2^-44. So `top_k` keeps the
same tokens, and the results differ only if the random number, `top_p` or `min_p` falls that close
to a border between two tokens.
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

# Logits that a program looks at together.
_N_LANES = 4096

_N_WARPS = 16

# Blocks of logits that are on their way at the same time.
_N_STAGES = 4

# Low bits that no value of a type has as a float32.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _order_of(value, SHIFT: tl.constexpr):
    """Maps float32 to whole numbers in the same order; SHIFT low bits must be unused."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 is 0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order >> SHIFT).to(tl.int64)


@triton.jit
def _value_of(order, SHIFT: tl.constexpr):
    """Maps whole numbers back to float32: the inverse of `_order_of`."""
    low_bits = tl.where(order < 0, (1 << SHIFT) - 1, 0)
    order = ((order << SHIFT) + low_bits).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(value, largest, scale):
    """Returns the weights of logits relative to the largest; `scale` is log2(e) / temperature."""
    return tl.exp2((value - largest) * scale)


@triton.jit
def _whole(weight):
    return (weight * 17592186044416.0).to(tl.int64)  # 2^44: a sum of 2^18 has room


@triton.jit
def _load(row, start, N, LANES: tl.constexpr):
    """Loads a block of a row as float32; past the end it is -inf, which no logit is."""
    places = start + tl.arange(0, LANES)
    return tl.load(row + places, places < N, float("-inf")).to(tl.float32)


@triton.jit
def _look(row, N, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Returns the largest logit of each lane and of all, and its first token or -1."""
    lane = tl.arange(0, LANES)
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    starts = tl.zeros((LANES,), tl.int32)  # of the blocks that they are in
    is_bad = tl.zeros((LANES,), tl.int32)
    for start in tl.range(0, N, LANES, num_stages=STAGES):
        value = _load(row, start, N, LANES)
        is_bad |= ((start + lane < N) & ((tl.abs(value) < float("inf")) == 0)).to(tl.int32)
        is_better = value > peaks  # of equals the first stays
        peaks = tl.where(is_better, value, peaks)
        starts = tl.where(is_better, start, starts)
    largest = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == largest, starts + lane, 0x7FFFFFFF), 0)
    return peaks, largest, tl.where(tl.max(is_bad, 0) > 0, -1, token)


@triton.jit
def _bound(peaks, largest, n_wanted, SHIFT: tl.constexpr):
    """Returns a value that at least `n_wanted` lanes reach, and no more if it can be."""
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
    """Writes values and ids of the logits that reach `bound`, in order, while there is room.

    Returns how many there are, and the weight of the whole row if it `needs_total`.
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
    tl.debug_barrier()  # other threads read what one has written
    return n_found, tl.sum(total, 0)


@triton.jit
def _count(row, N, bound, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Returns how many logits reach `bound`."""
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
    """Returns how many logits reach `bound`, or are above it, and their weight."""
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
    """Returns the least weight that is not below `top_p` of the total."""
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
    """Applies `top_k`: returns a bound, how many logits equal to it stay, and the kept weight.

    Logits above the bound stay. At least `n_wanted` logits reach `low`.
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
    """Applies `top_p`: returns a bound, and how many of the logits that equal it stay.

    Logits above the bound stay. Those above `low` and `n_kept` equal to it weigh `goal` or more.
    """
    last = _order_of(low, SHIFT)
    # What is below weighs nothing.
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
    """Returns the weights of a block, of those equal to `bound` the first `n_kept`, and their
    number."""
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
    """Returns the first place whose cumulative weight is above `uniform` of the total."""
    starts = LANES * tl.arange(0, BLOCKS)
    weights = tl.zeros((BLOCKS,), tl.int64)
    n_left = tl.zeros((BLOCKS,), tl.int64)  # of n_kept, for a block and what follows
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
    """Samples a place of a row whose logits below `low` are sure to be dropped."""
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
        # Its inverse must be a number, and what is BANNED must weigh nothing.
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
    """Samples as `Ops.sample` does; waits for nothing.

    `n_lanes`, a power of two, are the logits that a program looks at together.
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

    NaNs and infinities stay, since they mark a row that cannot be sampled.
    """
    logits = logits.float()
    places = columns.banned_rows, columns.banned_ids
    banned = logits[places]
    return logits.index_put(places, banned.masked_fill(banned.isfinite(), BANNED))
