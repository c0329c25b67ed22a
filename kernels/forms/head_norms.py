"""Norms over single heads of queries and keys, which are applied before the rotary embedding."""

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
