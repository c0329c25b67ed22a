"""Adds what a layer computes to the residual stream, times a factor."""

import torch
from torch import Tensor


def add_scaled(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Returns `x + factor * y`, of the shape of both, [n_tokens, size]; `x` may be used up."""
    return torch.add(x, y, alpha=factor)
