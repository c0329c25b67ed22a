"""Keeps numbers within a cap, smoothly."""

from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns `cap * tanh(x / cap)` in float32, of the shape of `x` [n, size]."""
    return (x.float() / cap).tanh_().mul_(cap)
