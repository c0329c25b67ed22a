"""A gated product in two operations, where no matrix gates by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.weights.linear import Clamp, Gate, LinearWeight


@dataclass(frozen=True, slots=True)
class GatedInTwo:
    """A `GatedWeight` that multiplies, then gates, in two operations."""

    weight: LinearWeight  # [2 * n_out, n_in], the gate's rows first
    gate: Gate | Clamp
    op: Callable[[Tensor], Tensor]  # computes the gate, of gates and what they gate side by side
    bias: Tensor | None = None  # [2 * n_out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(self.weight(x, self.bias))  # [n_tokens, n_out]
