"""Elementwise operations: scaled sums and soft caps."""

from __future__ import annotations

import torch
from torch import Tensor


def add_scaled(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Returns `x + factor * y`. Both tensors and the result are [n_tokens, size]. `x` may be
    overwritten."""
    return torch.add(x, y, alpha=factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns `cap * tanh(x / cap)` in float32, in the shape of `x` [n, size]."""
    return (x.float() / cap).tanh_().mul_(cap)
