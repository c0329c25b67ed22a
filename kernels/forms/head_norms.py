"""The norms of single heads of queries and keys, which are applied before the rotation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms (see `Ops.rms_norm`), each over the elements of one head.

    Weights are dense and may be of another type than the heads.
    """

    q: Tensor  # [head_dim], by which a normalised head of queries is multiplied
    k: Tensor  # [head_dim], by which a normalised head of keys is multiplied
    eps: float
