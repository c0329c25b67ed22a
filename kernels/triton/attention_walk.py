"""The loop of attention over the keys of a tile, with the running softmax of FlashAttention.

The softmax is computed in base 2 (Dao et al., 2022). The keys of a sequence lie in blocks that may
be anywhere in storage. A step of the loop loads the block ids of its keys and gathers whole rows of
a head.

Values may be the first elements of the keys, as in latent attention. They are then loaded once, as
keys, and the other elements of the keys get a second product, so that the tiles of both products
have sizes that are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _masked(scores, keys, positions, last_key, window, HAS_WINDOW: tl.constexpr):
    """Returns `scores` [ROWS, KEYS] with minus infinity for keys to which a row must not attend."""
    is_seen = keys[None, :] <= tl.minimum(positions, last_key)[:, None]
    if HAS_WINDOW:
        is_seen &= keys[None, :] > (positions - window)[:, None]
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def walk(
    totals,
    sums,
    peaks,
    q,
    q_rest,
    positions,
    begin,
    end,
    inner_begin,
    inner_end,
    last_key,
    keys_of_head,
    values_of_head,
    table,
    window,
    scale,
    soft_cap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_INNER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST_DIM: tl.constexpr,
    REST_DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes attention to the keys [begin, end). Keys after `last_key` are not read.

    Returns the updated `totals` (weighted sums of values), `sums` of weights and `peaks` (largest
    scores) of each row. All rows attend to all keys in [inner_begin, inner_end), so steps within
    this range need no mask. Steps with and without a mask share one loop, because in two loops
    ptxas would wait for each matrix instruction (wgmma).
    """
    dims = tl.arange(0, DIMS)
    is_dim = (dims < VALUE_DIM)[None, :]
    some_keys = keys_of_head + dims[None, :]
    some_values = values_of_head + dims[None, :]
    # Past the end the last key is read again, with a weight of zero. Block ids are loaded one step
    # ahead, so that the loads of keys and values need not wait for them.
    stored = tl.minimum(begin + tl.arange(0, KEYS), last_key).to(tl.uint32)
    blocks = tl.load(table + stored // BLOCK_SIZE)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        keys = first + tl.arange(0, KEYS)
        in_block = (stored % BLOCK_SIZE).to(tl.int32) * TOKEN_STRIDE
        places = (blocks.to(tl.int64) * (BLOCK_SIZE * TOKEN_STRIDE) + in_block)[:, None]
        stored = tl.minimum(keys + KEYS, last_key).to(tl.uint32)
        blocks = tl.load(table + stored // BLOCK_SIZE)
        if VALUE_DIM == DIMS:
            k = tl.load(some_keys + places)  # [KEYS, DIMS]
        else:
            k = tl.load(some_keys + places, mask=is_dim, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
        if REST_DIM > 0:
            rest_dims = tl.arange(0, REST_DIMS)[None, :]
            some_rest = keys_of_head + VALUE_DIM + rest_dims + places
            rest = tl.load(some_rest, mask=rest_dims < REST_DIM, other=0.0)  # [KEYS, REST_DIMS]
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1). `scale` and `soft_cap` include the factors that
            # base 2 needs.
            scores = soft_cap - 2.0 * soft_cap / (tl.exp2(scores * scale) + 1.0)
        else:
            scores *= scale
        if HAS_INNER:
            if (first < inner_begin) | (first + KEYS > inner_end):
                scores = _masked(scores, keys, positions, last_key, window, HAS_WINDOW)
        else:
            scores = _masked(scores, keys, positions, last_key, window, HAS_WINDOW)
        new_peaks = tl.maximum(peaks, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peaks[:, None])
        shrink = tl.exp2(peaks - new_peaks)
        peaks = new_peaks
        sums = sums * shrink + tl.sum(weights, 1)
        totals *= shrink[:, None]
        if REST_DIM > 0:
            v = k
        elif VALUE_DIM == DIMS:
            v = tl.load(some_values + places)
        else:
            v = tl.load(some_values + places, mask=is_dim, other=0.0)
        totals = tl.dot(weights.to(v.dtype), v, totals, input_precision="ieee")
    return totals, sums, peaks
