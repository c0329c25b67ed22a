"""The options of a layer's experts (biases and gate), and experts with stacked matrices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.weights.linear import Clamp, Gate


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The biases and the gate of a layer's experts. By default, the gate is SiLU and there are no
    biases."""

    gate_up_bias: Tensor | None = None  # [n_experts, 2 * size], the gate's biases first
    down_bias: Tensor | None = None  # [n_experts, hidden]
    clamp: Clamp | None = None  # used instead of `gate` if given
    gate: Gate = "silu"


PLAIN_EXPERTS = ExpertForm()


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The matrices of all experts of a layer, stacked in two tensors, for `Ops.expert_mlp`."""

    gate_up: Tensor  # [n_experts, 2 * size, hidden], the gate's rows first
    down: Tensor  # [n_experts, hidden, size]
    form: ExpertForm
