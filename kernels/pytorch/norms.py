"""Root-mean-square (Zhang & Sennrich, 2019) and layer normalisation (Ba et al., 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / rms(x) * weight` over the last dimension of `x` [..., size]; `weight` is [size].

    `weight` may be of another type than `x`, whose type the result has. In float32 equal to the
    reference to the last bit; in bfloat16 it rounds once where the reference rounds twice (a
    quarter of the elements differ in their last bit).
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)  # [..., size]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalises `x` [..., size] over its last dimension; `weight` and `bias` are [size]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)  # [..., size]
