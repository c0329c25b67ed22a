"""GeLU (Hendrycks & Gimpel, 2016), by the error function."""

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Returns `x` times the share of a normal distribution below it, of the shape of `x`
    [n_tokens, size]."""
    return F.gelu(x)
