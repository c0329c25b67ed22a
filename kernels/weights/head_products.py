"""Products of each head's vector with a matrix of that head. Latent attention needs such products.

`kernels.pytorch.heads` and `kernels.native.heads` implement the products; `kernels.packing.heads`
chooses between the two.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HeadProducts(Protocol):
    """A matrix [n_out, n_in] for each head, which multiplies the head's vectors."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of heads, of outputs and of inputs: n_heads, n_out and n_in."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the products [n_tokens, n_heads, n_out] for `x` [n_tokens, n_heads, n_in]."""
