"""Layer normalisation with scale and shift (Ba et al., 2016)."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalises `x` [..., size] over its last dimension; `weight` and `bias` are [size]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)  # [..., size]
