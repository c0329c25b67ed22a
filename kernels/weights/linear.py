"""The interfaces of the matrices of linear layers, and the plain matrix.

A residual is added to the sums before rounding, so that fusing the addition loses no precision.
`kernels.packing.linear` picks the form that is fastest on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

Quantization = Literal["none", "int8", "int4"]
Activations = Literal["rounded", "exact"]
Gate = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Clamp:
    """The gate `(up + 1) * gate * sigmoid(slope * gate)` with clamped inputs (gpt-oss).

    `gate` is clamped to at most `limit`, and `up` to the range from `-limit` to `limit`.
    """

    slope: float
    limit: float


@runtime_checkable
class LinearWeight(Protocol):
    """A matrix [n_out, n_in] in any storage form, which multiplies tokens."""

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes n_out and n_in."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of memory that the matrix takes."""

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Returns `x @ weight.T + bias + residual`, [n_tokens, n_out].

        `x` is [n_tokens, n_in], `bias` [n_out] and `residual` [n_tokens, n_out]. The residual may
        be overwritten by the result.
        """


class TableWeight(LinearWeight, Protocol):
    """A matrix that can multiply tokens, and whose rows can be looked up. Embedding and head may
    share such a matrix."""

    def rows(self, indices: Tensor) -> Tensor:
        """Returns the rows of the matrix with the indices `indices` [n], as [n, n_in]."""


@runtime_checkable
class PanelTable(TableWeight, Protocol):
    """A table that is packed for the native library, in panels.

    A panel is a group of rows that are stored interleaved: the first 32-bit word of each row, then
    the second word of each row, and so on.
    """

    @property
    def packed(self) -> Tensor:
        """The rows in panels, [n_panels, n_steps, panel, inputs]. A panel is a block of `panel`
        adjacent rows, and a 32-bit word has `inputs` elements."""


class GatedWeight(Protocol):
    """The gate and up matrices of a gated MLP, [n_out, n_in] each, with a fused gate function."""

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes of the two matrices together, 2 * n_out and n_in."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `gate(x @ gate_matrix.T) * (x @ up_matrix.T)`, [n_tokens, n_out].

        `x` is [n_tokens, n_in].
        """


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A matrix in PyTorch's own layout, neither packed nor quantised."""

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
