"""A gated product in two operations, where no matrix gates by itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.weights.linear import Clamp, Gate, GatedWeight, LinearWeight


@dataclass(frozen=True, slots=True)
class GatedInTwo:
    """A matrix to gates and to the numbers that are gated, whose gate is another operation."""

    weight: LinearWeight  # [2 * n_out, n_in], the gate's rows first
    gate: Gate | Clamp
    bias: Tensor | None = None  # [2 * n_out]

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes 2 * n_out and n_in."""
        return self.weight.shape


GatedMatrix = GatedWeight | GatedInTwo
"""What computes the first half of a gated MLP."""
