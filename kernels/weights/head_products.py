"""Products of every head's vector with a matrix of the head's own, as latent attention needs them.

Their forms are in `kernels.packing.heads` and `kernels.native.heads`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HeadProducts(Protocol):
    """A matrix [n_out, n_in] for each head."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, outputs and inputs."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [n_tokens, n_heads, n_out] for `x` [n_tokens, n_heads, n_in]."""
