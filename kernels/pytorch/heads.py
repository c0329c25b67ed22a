"""Products of each head's vector with the head's own matrix, by PyTorch's batched matrix
product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlainHeads:
    """The matrices of all heads in one unpacked tensor. Calling the object multiplies each head of
    `x` [n_tokens, n_heads, n_in] with its matrix."""

    weight: Tensor  # [n_heads, n_out, n_in]

    @property
    def shape(self) -> tuple[int, int, int]:
        n_heads, n_out, n_in = self.weight.shape
        return n_heads, n_out, n_in

    def __call__(self, x: Tensor) -> Tensor:
        products = torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2))
        return products.transpose(0, 1)  # [n_tokens, n_heads, n_out]
