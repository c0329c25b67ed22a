"""Matrices of heads, in the form that is fastest where they lie.

`pack_heads` picks it by device and element type. On a CPU the native library computes products;
its sums of a token do not depend on how many others there are (`docs/determinism.md`). Elsewhere
they are PyTorch's product of batches, a head for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.heads import NativeHeads, can_pack_heads
from kernels.weights.head_products import HeadProducts


@dataclass(frozen=True, slots=True)
class PlainHeads:
    """The matrices as they are."""

    weight: Tensor  # [n_heads, n_out, n_in]

    @property
    def shape(self) -> tuple[int, int, int]:
        n_heads, n_out, n_in = self.weight.shape
        return n_heads, n_out, n_in

    def __call__(self, x: Tensor) -> Tensor:
        products = torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2))
        return products.transpose(0, 1)  # [n_tokens, n_heads, n_out]


def pack_heads(weight: Tensor) -> HeadProducts:
    """Returns `weight` [n_heads, n_out, n_in] in the form that is fastest where it lies."""
    return NativeHeads.of(weight) if can_pack_heads(weight) else PlainHeads(weight)
