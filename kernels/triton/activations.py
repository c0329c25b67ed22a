"""Gate functions in float32, called by kernels on values in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """Returns `x * sigmoid(x)`."""
    return x * sigmoid(x)


@triton.jit
def gelu(x):
    """Returns the tanh approximation of GeLU. The factor `(1 + tanh(u)) / 2` in its formula is
    computed as the equal `sigmoid(2 * u)`."""
    twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi)
    return x * sigmoid(twice)


@triton.jit
def clamped(gate, up, slope, limit):
    """Returns `up` gated by `gate`, both clamped. `kernels.weights.linear.Clamp` defines the
    formula."""
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    return (up + 1.0) * gate * sigmoid(slope * gate)


@triton.jit
def sigmoid(x):
    """Returns `1 / (1 + exp(-x))`. It is computed from `exp(-abs(x))`, which cannot overflow."""
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0, power, 1.0) / (1.0 + power)
