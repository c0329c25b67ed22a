"""How single heads of queries and keys are normalised before they turn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms (see `Ops.rms_norm`) over each head by itself.

    Weights may be of another type than the heads, and lie in memory without gaps.
    """

    q: Tensor  # [head_dim], by which a head of queries is multiplied
    k: Tensor  # [head_dim], the same for keys
    eps: float
