"""Rotary position embedding on a GPU.

A program turns some heads of one token: both halves of a head are read at once, so that each
element is read and written once, 4 * head_dim bytes per head in bfloat16 and 3 operations per
element, in float32. The angles, of which the two halves say the same, are read half.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that a program turns.
_N_PAIRS = 1024


@cache
def head_form(n_heads: int, half: int) -> tuple[int, int]:
    """Returns the heads of a program, and the pairs that those of a head are padded to."""
    padded = triton.next_power_of_2(half)
    return min(triton.next_power_of_2(n_heads), max(1, _N_PAIRS // padded)), padded


@triton.jit
def turn(first, second, cos, sin):
    """Returns both halves of heads [n, pairs], turned by the angles [pairs] of the second half."""
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
    """Implements `Ops.rotary`."""
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
