"""The shape and the small weights of one rank's heads of a Gated DeltaNet layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LENGTH_EPS = 1e-6
"""Number added to the sum of squares of a query or key before the vector is scaled to length 1."""


@dataclass(frozen=True, slots=True)
class DeltaNetForm:
    """The shape and the small weights of a Gated DeltaNet layer; see `Ops.delta_net`.

    Each key head serves `n_value_heads / n_key_heads` consecutive value heads. Tensors are float32
    and dense.
    """

    n_key_heads: int
    n_value_heads: int
    key_dim: int  # elements of a head of queries or keys
    value_dim: int  # elements of a head of values
    conv: Tensor  # [kernel_size, n_channels], the last row is the factor of the token itself
    decay_rate: Tensor  # [n_value_heads], below 0
    step_bias: Tensor  # [n_value_heads]
    norm: Tensor  # [value_dim], scale of the norm over a head's output
    eps: float  # epsilon of the norm

    @property
    def kernel_size(self) -> int:
        """Number of tokens over which a channel is convolved."""
        return self.conv.shape[0]

    @property
    def n_channels(self) -> int:
        """Number of elements of a token's queries, keys and values together."""
        return 2 * self.n_key_heads * self.key_dim + self.n_out

    @property
    def n_out(self) -> int:
        """Number of elements of a token's output."""
        return self.n_value_heads * self.value_dim
