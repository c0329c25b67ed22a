"""The form of a layer's experts beside their products, and experts that lie side by side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.weights.linear import Clamp, Gate


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The form of all experts of a layer; the default is gated with SiLU and has no biases."""

    gate_up_bias: Tensor | None = None  # [n_experts, 2 * size], of gates first
    down_bias: Tensor | None = None  # [n_experts, hidden]
    clamp: Clamp | None = None  # in place of the gate below
    gate: Gate = "silu"


PLAIN_EXPERTS = ExpertForm()


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The matrices of all experts side by side, for an operation that takes all of them."""

    gate_up: Tensor  # [n_experts, 2 * size, hidden], the gate's rows first
    down: Tensor  # [n_experts, hidden, size]
    form: ExpertForm
