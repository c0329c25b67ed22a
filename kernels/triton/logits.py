"""Logits in kernels: loading a block of them, integers with the same order, and sampling weights.

A logit is represented by an integer with the same order, so that a bisection over logits is a
bisection over integers and ends at an exact value. Weights are integers of 64 bits, in units of
2^-44 of the largest weight. Their sums are exact in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_block(row, start, N, LANES: tl.constexpr):
    """Loads a block of a row as float32, with -inf past the end of the row."""
    places = start + tl.arange(0, LANES)
    return tl.load(row + places, places < N, float("-inf")).to(tl.float32)


@triton.jit
def order_of(value, SHIFT: tl.constexpr):
    """Maps the float32 numbers `value` to integers with the same order. The SHIFT lowest bits of
    `value` must be zero."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 is 0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order >> SHIFT).to(tl.int64)


@triton.jit
def value_of(order, SHIFT: tl.constexpr):
    """Converts integers from `order_of` back to float32 numbers."""
    low_bits = tl.where(order < 0, (1 << SHIFT) - 1, 0)
    order = ((order << SHIFT) + low_bits).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(value, largest, scale):
    """Returns the weights of logits relative to the largest. `scale` is log2(e) / temperature."""
    return tl.exp2((value - largest) * scale)


@triton.jit
def whole_weight(weight):
    return (weight * 17592186044416.0).to(tl.int64)  # 2^44: the sum of 2^18 weights fits 64 bits
