"""A gated product in two operations, for devices without a fused gated product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.weights.linear import Clamp, Gate, GatedWeight, LinearWeight


@dataclass(frozen=True, slots=True)
class GatedInTwo:
    """The gate and up matrices of a gated MLP in one matrix. A second operation applies the gate
    function to the product."""

    weight: LinearWeight  # [2 * n_out, n_in], the gate's rows first
    gate: Gate | Clamp
    bias: Tensor | None = None  # [2 * n_out]

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes 2 * n_out and n_in."""
        return self.weight.shape


GatedMatrix = GatedWeight | GatedInTwo
"""The gate and up matrices of a gated MLP with the gate function. The gate function is either fused
with the product or applied by a second operation."""
