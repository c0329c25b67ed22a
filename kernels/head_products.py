"""Products of every head's vector with a matrix of the head's own, as latent attention needs them.

`pack_heads` picks the form by device and element type. On a CPU the native library computes them;
its sums of a token do not depend on how many others there are (`docs/determinism.md`). Elsewhere
they are PyTorch's product of batches, a head for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.native.heads import NativeHeads, can_pack_heads


class HeadProducts(Protocol):
    """A matrix [n_out, n_in] for each head."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, outputs and inputs."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [n_tokens, n_heads, n_out] for `x` [n_tokens, n_heads, n_in]."""


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
