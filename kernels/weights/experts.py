"""The experts of a layer whose matrices are one tensor each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.forms.experts import ExpertForm


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The matrices of all experts side by side, for an operation that takes all of them."""

    gate_up: Tensor  # [n_experts, 2 * size, hidden], the gate's rows first
    down: Tensor  # [n_experts, hidden, size]
    form: ExpertForm
