"""Puts the keys and values of new tokens into their slots on a GPU.

One launch for both: each is read once, wherever in a wider row it lies, and written once, 8 *
n_kv_heads * head_dim bytes per token in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of a program, of keys and of values


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
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of a token's heads
    is_there = element < SIZE
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    place = tl.load(slots + token).to(tl.int64) * SIZE + element
    key = tl.load(k + token * k_token_stride + head * k_head_stride + dim, is_there)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, is_there)
    tl.store(key_cache + place, key, is_there)
    tl.store(value_cache + place, value, is_there)


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Implements `Ops.write_kv`."""
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
