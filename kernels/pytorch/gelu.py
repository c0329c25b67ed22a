"""GeLU (Hendrycks & Gimpel, 2016), by the error function."""

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Returns `x * Phi(x)`, of the shape of `x` [n_tokens, size]; `Phi` is the standard normal
    distribution function."""
    return F.gelu(x)
