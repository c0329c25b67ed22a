"""What a linear layer's matrix is to the code that multiplies with it.

A residual is added to the sums before they are rounded, so that fusing it makes results no worse.
`kernels.packing.linear` picks the form that is fastest on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

Quantization = Literal["none", "int8", "int4"]
Gate = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Clamp:
    """The gate `(up + 1) * gate * sigmoid(slope * gate)` of clamped inputs (gpt-oss).

    Gates are at most `limit`, and what they gate is between `-limit` and `limit`.
    """

    slope: float
    limit: float


@runtime_checkable
class LinearWeight(Protocol):
    """A matrix [n_out, n_in] in some form, which multiplies tokens."""

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes n_out and n_in."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Returns `x @ weight.T + bias + residual`, [n_tokens, n_out].

        `x` is [n_tokens, n_in], `bias` [n_out] and `residual` [n_tokens, n_out], which is used up:
        the result may take its place.
        """


class TableWeight(LinearWeight, Protocol):
    """A matrix that is multiplied with and looked up in: embedding and head in one."""

    def rows(self, indices: Tensor) -> Tensor:
        """Returns rows of the matrix, [n, n_in], for `indices` [n]."""


@runtime_checkable
class PanelTable(TableWeight, Protocol):
    """A table that lies in panels of whole numbers of a word, as the native library packs it."""

    @property
    def packed(self) -> Tensor:
        """The rows in their panels, [n_panels, n_steps, panel, inputs]."""


class GatedWeight(Protocol):
    """Two matrices [n_out, n_in] each: a gate's, and that of what it gates."""

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes of both together, 2 * n_out and n_in."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `gate(x @ first.T) * (x @ second.T)`, [n_tokens, n_out].

        `x` is [n_tokens, n_in].
        """


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """The matrix as it is."""

    weight: Tensor  # [n_out, n_in]

    @property
    def shape(self) -> tuple[int, int]:
        n_out, n_in = self.weight.shape
        return n_out, n_in

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        out = F.linear(x, self.weight, bias)  # [n_tokens, n_out]
        return out if residual is None else out.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight.index_select(0, indices)  # [n, n_in]
