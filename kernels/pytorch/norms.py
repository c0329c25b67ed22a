"""Root-mean-square (Zhang & Sennrich, 2019) and layer normalisation (Ba et al., 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / rms(x) * weight` over the last dimension of `x` [..., size]. `weight` is [size].

    The result has the type of `x`. `weight` may be of another type. In float32 the result is
    bit-identical to the reference. In bfloat16 the result is rounded once and the reference twice,
    so a quarter of the elements differ in the last bit.
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)  # [..., size]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns `x` [..., size] normalised to mean 0 and variance 1 over its last dimension, times
    `weight` [size] plus `bias` [size]. `eps` is added to the variance."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)  # [..., size]
