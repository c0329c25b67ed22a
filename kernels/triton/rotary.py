"""Rotary position embedding, and storing of keys and values, on a GPU.

`rotary`: a program rotates some heads of one token. Both halves of a head are read together, so
that each element is read and written once: 4 * head_dim bytes per head in bfloat16, and 3
operations per element in float32. Only one half of the angles is read, because both halves are
equal.

`write_kv`: one launch stores keys and values. Each element is read once, possibly from a part of a
wider row, and written once: 8 * n_kv_heads * head_dim bytes per token in bfloat16.

`rotary_write_kv`: one launch reads the queries, keys and values of a token once, and writes each
once: queries in place, keys and values into the token's slot. That moves 4 * head_dim bytes per
head in bfloat16. Separate rotation, slicing and storing would move keys twice and need five
launches. A norm needs no further launch, because a program has whole heads in registers: it sums
the squares of a head and reads the norm's weights from the cache, and rounds nothing before the
rotation. A program has some heads of one token, which may be queries, keys or values. Queries, keys
and values each have a masked store.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.head_norms import HeadNorms

# Number of pairs that a program rotates.
_N_PAIRS = 1024


@cache
def head_form(n_heads: int, half: int) -> tuple[int, int]:
    """Returns the number of heads that one program of the kernel rotates, and the padded number of
    pairs of a head. `half` is the number of pairs without padding."""
    padded = triton.next_power_of_2(half)
    return min(triton.next_power_of_2(n_heads), max(1, _N_PAIRS // padded)), padded


@triton.jit
def turn(first, second, cos, sin):
    """Rotates the heads whose halves are `first` and `second` [n, pairs], and returns the two
    halves of the rotated heads. `cos` and `sin` are the second halves of the arguments of
    `Ops.rotary`, in which sines are not negated."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotary(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    is_there = (head < N_HEADS)[:, None] & (pair < HALF)[None, :]
    angle = token * HEAD_DIM + HALF + pair
    cosines = tl.load(cos + angle, pair < HALF, 0.0).to(tl.float32)
    sines = tl.load(sin + angle, pair < HALF, 0.0).to(tl.float32)
    place = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(place, is_there, 0.0).to(tl.float32)
    second = tl.load(place + HALF, is_there, 0.0).to(tl.float32)
    first, second = turn(first, second, cosines[None, :], sines[None, :])
    turned = out + (token * N_HEADS + head[:, None]) * HEAD_DIM + pair[None, :]
    tl.store(turned, first, is_there)
    tl.store(turned + HALF, second, is_there)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads, as `Ops.rotary` describes."""
    if x.stride(2) != 1:
        x = x.contiguous()
    n_tokens, n_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n, padded = head_form(n_heads, head_dim // 2)
    _rotary[(n_tokens, triton.cdiv(n_heads, n))](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        x.stride(0),
        x.stride(1),
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        HEADS=n,
        PAIRS=padded,
        num_warps=4,
    )
    return out


_BLOCK = 1024  # number of elements of keys, and of values, that a program stores


@triton.jit
def _write_kv(
    k,
    v,
    key_cache,
    value_cache,
    slots,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # index in a token's heads
    is_there = element < SIZE
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    place = tl.load(slots + token).to(tl.int64) * SIZE + element
    key = tl.load(k + token * k_token_stride + head * k_head_stride + dim, is_there)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, is_there)
    tl.store(key_cache + place, key, is_there)
    tl.store(value_cache + place, value, is_there)


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores keys and values, as `Ops.write_kv` describes."""
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    n_tokens, n_kv_heads, head_dim = k.shape
    size = n_kv_heads * head_dim
    _write_kv[(n_tokens, triton.cdiv(size, _BLOCK))](
        k,
        v,
        key_cache,
        value_cache,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEAD_DIM=head_dim,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _weights(q_norm, k_norm, place, is_there, is_query):
    """Returns the norms' weights [n, pairs] of n heads, for the elements `place` [1, pairs]. A head
    is a query if `is_query` [n, 1] is true, otherwise a key."""
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
    """Rotates queries and keys and stores keys and values, as `Ops.rotary_write_kv` describes. The
    result is a view of `qkv`."""
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
