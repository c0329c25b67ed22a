"""From the fused projection to turned queries, and keys and values in their slots, on a GPU.

One launch reads a token's queries, keys and values once and writes each once to where it stays:
queries where they were, keys and values into their slot. That is 4 * head_dim bytes per head in
bfloat16, and nothing in between, where turning, slicing and storing one after the other would move
keys twice and need five launches. 3 operations per element that turns, in float32. A head that is
normalised first is in a program's registers whole, so that costs its squares and the two weights,
which stay in the cache; nothing is rounded in between.

A program has some heads of one token, of whatever kind. Each kind has a store of its own, which
heads of the others leave out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.head_norms import HeadNorms
from kernels.triton.rotary import head_form, turn


@triton.jit
def _weights(q_norm, k_norm, place, is_there, is_query):
    """Returns the weights [n, pairs] of heads [n, 1] at `place` [1, pairs]."""
    of_q = tl.load(q_norm + place, is_there, 0.0).to(tl.float32)
    of_k = tl.load(k_norm + place, is_there, 0.0).to(tl.float32)
    return tl.where(is_query, of_q, of_k)


@triton.jit
def _rotary_write_kv(
    qkv,
    cos,
    sin,
    key_cache,
    value_cache,
    slots,
    q_norm,
    k_norm,
    eps,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = pair < HALF
    angle = token * HEAD_DIM + HALF + pair
    cosines = tl.load(cos + angle, is_pair, 0.0).to(tl.float32)
    sines = tl.load(sin + angle, is_pair, 0.0).to(tl.float32)
    is_there = (head < N_HEADS + 2 * N_KV_HEADS) & is_pair
    place = qkv + (token * (N_HEADS + 2 * N_KV_HEADS) + head) * HEAD_DIM + pair
    first = tl.load(place, is_there, 0.0)
    second = tl.load(place + HALF, is_there, 0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    if q_norm is not None:
        squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]  # [HEADS, 1]
        wide_first *= scale * _weights(q_norm, k_norm, pair, is_pair, head < N_HEADS)
        wide_second *= scale * _weights(q_norm, k_norm, HALF + pair, is_pair, head < N_HEADS)
    turned_first, turned_second = turn(wide_first, wide_second, cosines, sines)

    is_query = (head < N_HEADS) & is_pair
    tl.store(place, turned_first, is_query)
    tl.store(place + HALF, turned_second, is_query)

    slot = tl.load(slots + token).to(tl.int64) * N_KV_HEADS
    kv_head = head - N_HEADS
    is_key = (kv_head >= 0) & (kv_head < N_KV_HEADS) & is_pair
    key = key_cache + (slot + kv_head) * HEAD_DIM + pair
    tl.store(key, turned_first, is_key)
    tl.store(key + HALF, turned_second, is_key)

    kv_head -= N_KV_HEADS
    is_value = (kv_head >= 0) & (kv_head < N_KV_HEADS) & is_pair
    value = value_cache + (slot + kv_head) * HEAD_DIM + pair
    tl.store(value, first, is_value)
    tl.store(value + HALF, second, is_value)


def rotary_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    n_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Implements `Ops.rotary_write_kv`; the queries are a part of `qkv`."""
    n_kv_heads, head_dim = key_cache.shape[2:]
    qkv = qkv.contiguous()
    n_tokens = qkv.shape[0]
    n_all = n_heads + 2 * n_kv_heads
    n, padded = head_form(n_all, head_dim // 2)
    _rotary_write_kv[(n_tokens, triton.cdiv(n_all, n))](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        key_cache,
        value_cache,
        slots,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        N_HEADS=n_heads,
        N_KV_HEADS=n_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=n,
        PAIRS=padded,
        num_warps=4,
    )
    return qkv.view(n_tokens, n_all, head_dim)[:, :n_heads]
