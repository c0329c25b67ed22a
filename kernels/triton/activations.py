"""The gates of gated MLPs, in float32, for kernels that have what they apply to in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """Returns `x * sigmoid(x)`."""
    return x * sigmoid(x)


@triton.jit
def gelu(x):
    """Returns GeLU by its tanh approximation; `(1 + tanh(u)) / 2` is `sigmoid(2 * u)`."""
    twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi)
    return x * sigmoid(twice)


@triton.jit
def clamped(gate, up, slope, limit):
    """Returns what `kernels.weights.linear.Clamp` describes."""
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    return (up + 1.0) * gate * sigmoid(slope * gate)


@triton.jit
def sigmoid(x):
    """Returns `1 / (1 + exp(-x))`, with exponentials of negative numbers only: none is infinite."""
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0, power, 1.0) / (1.0 + power)
