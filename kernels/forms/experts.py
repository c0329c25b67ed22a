"""The form of a layer's experts: what they compute beside gated MLPs of two products."""

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
