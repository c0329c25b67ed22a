"""Forms of a matrix that PyTorch multiplies with by way of cuBLAS or oneDNN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.weights.linear import PlainWeight


@dataclass(frozen=True, slots=True)
class CublasWeight(PlainWeight):
    """The matrix as it is, for sums that begin with the residual and take its place.

    cuBLAS adds to what is there, in the same launch.
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
    """The matrix in the blocks that oneDNN chooses."""

    weight: Tensor  # opaque, [n_out, n_in] as it says

    @classmethod
    def of(cls, weight: Tensor) -> OneDnnWeight:
        """Packs a matrix of float32, or of bfloat16 where the processor has instructions."""
        # The batch size that it could be told makes no difference to the blocks.
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
