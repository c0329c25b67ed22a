"""Norms over single query heads and key heads. They are applied before the rotation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms (see `Ops.rms_norm`), each over the elements of one head.

    The weights are dense, and their type may differ from the type of the heads.
    """

    q: Tensor  # [head_dim], by which a normalised head of queries is multiplied
    k: Tensor  # [head_dim], by which a normalised head of keys is multiplied
    eps: float
