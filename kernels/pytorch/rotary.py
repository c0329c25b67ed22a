"""Rotary position embedding (Su et al., 2021), halves paired as in Hugging Face checkpoints."""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns every head of `x` [n_tokens, n_heads, head_dim] by the angles of its token's position.

    `cos` and `sin` are [n_tokens, 1, head_dim]: the angles of the first half repeated for the
    second, the first half of `sin` negated, so that the turn is `x * cos + swapped(x) * sin` and
    needs no second look at which half an element is in.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)  # [n_tokens, n_heads, head_dim]
    return torch.addcmul(x * cos, swapped, sin)  # [n_tokens, n_heads, head_dim]
