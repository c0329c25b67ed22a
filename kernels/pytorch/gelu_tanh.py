"""GeLU (Hendrycks & Gimpel, 2016) in its tanh approximation."""

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns `gelu(x)`, of the shape of `x` [n_tokens, size]."""
    return F.gelu(x, approximate="tanh")
