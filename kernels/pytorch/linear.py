"""Matrices in two storage forms: for products by cuBLAS and for products by oneDNN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.weights.linear import PlainWeight


@dataclass(frozen=True, slots=True)
class CublasWeight(PlainWeight):
    """An unpacked matrix for products by cuBLAS. A product with a residual overwrites the residual.

    cuBLAS adds the product to the residual in one launch.
    """

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if residual is None:
            return F.linear(x, self.weight, bias)  # [n_tokens, n_out]
        if bias is not None:
            residual.add_(bias)
        return residual.addmm_(x, self.weight.t())


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """A matrix that oneDNN has packed in a blocked layout."""

    weight: Tensor  # an opaque tensor, whose `shape` is [n_out, n_in]

    @classmethod
    def of(cls, weight: Tensor) -> OneDnnWeight:
        """Packs `weight` [n_out, n_in]. It must be float32 or, if the processor has instructions
        for bfloat16, bfloat16."""
        # The function also accepts a batch size, which does not change the blocks.
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight))

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
        linear = torch.ops.mkldnn._linear_pointwise
        if residual is None:
            out: Tensor = linear.default(x, self.weight, bias, "none", [], "")
        else:
            out = linear.binary(x, residual, self.weight, bias, "add")
        return out  # [n_tokens, n_out]
