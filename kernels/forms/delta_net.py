"""What one rank's heads of a Gated DeltaNet layer compute with, beside their projections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LENGTH_EPS = 1e-6
"""Added to the sum of squares of a query or key that is scaled to length 1."""


@dataclass(frozen=True, slots=True)
class DeltaNetForm:
    """The shape and the small weights of a layer; see `Ops.delta_net`.

    Consecutive value heads share a key head, as many each. Tensors are float32 and dense.
    """

    n_key_heads: int
    n_value_heads: int
    key_dim: int  # elements of a head of queries or keys
    value_dim: int  # elements of a head of values
    conv: Tensor  # [kernel_size, n_channels], the last one is of the token itself
    decay_rate: Tensor  # [n_value_heads], below 0
    step_bias: Tensor  # [n_value_heads]
    norm: Tensor  # [value_dim], scale of the norm over a head's output
    eps: float  # of that norm

    @property
    def kernel_size(self) -> int:
        """How many tokens a channel's convolution sees."""
        return self.conv.shape[0]

    @property
    def n_channels(self) -> int:
        """The elements of a token's queries, keys and values together."""
        return 2 * self.n_key_heads * self.key_dim + self.n_out

    @property
    def n_out(self) -> int:
        """The elements of a token's output."""
        return self.n_value_heads * self.value_dim
