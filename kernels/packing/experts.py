"""Experts of a mixture in the form that is fastest where their matrices lie.

On a CPU with the native library each matrix is packed by itself, as `kernels.packing.linear` packs
it. Elsewhere the matrices of all experts stay side by side, for `Ops.expert_mlp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.forms.experts import PLAIN_EXPERTS, ExpertForm
from kernels.native.linear import can_pack
from kernels.ops import Ops, RunExpertMLPs
from kernels.packing.linear import pack, pack_gated, pack_grouped, pack_grouped_gated
from kernels.pytorch.expert_mlp import mix_experts
from kernels.weights.experts import ExpertMLP
from kernels.weights.gated_in_two import GatedInTwo
from kernels.weights.groups import GroupedMatrix
from kernels.weights.linear import GatedWeight, LinearWeight


@dataclass(frozen=True, slots=True)
class Biased:
    """Multiplies and adds a bias."""

    weight: LinearWeight
    bias: Tensor  # [n_out]

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight(x, self.bias)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Experts whose matrices are packed one by one; implements `ExpertMLP`."""

    gate_up: Sequence[GatedWeight]
    down: Sequence[LinearWeight | Biased]

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return mix_experts(x, experts, weights, n_experts=len(self.down), mlp=self._mlp)

    def _mlp(self, expert: int, x: Tensor) -> Tensor:
        return self.down[expert](self.gate_up[expert](x))


@dataclass(frozen=True, slots=True)
class _PlainExperts:
    """Experts whose matrices stay as they are, for an operation that takes all of them."""

    gate_up: Tensor
    down: Tensor
    form: ExpertForm
    op: RunExpertMLPs

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return self.op(x, self.gate_up, self.down, experts, weights, self.form)


def pack_experts(
    gate_up: Tensor, down: Tensor, ops: Ops, form: ExpertForm = PLAIN_EXPERTS
) -> ExpertMLP:
    """Returns experts as they are computed fastest where they lie.

    `gate_up` is [n_experts, 2 * size, hidden], the gate's matrix first, `down`
    [n_experts, hidden, size].
    """
    if not can_pack(down):
        return _PlainExperts(gate_up, down, form, ops.expert_mlp)
    return PackedExperts(
        [_pack_gates(weight, form, i, ops) for i, weight in enumerate(gate_up)],
        [_with_down_bias(pack(weight), form, i) for i, weight in enumerate(down)],
    )


def pack_grouped_experts(
    gate_up: Iterable[GroupedMatrix],
    down: Iterable[GroupedMatrix],
    dtype: torch.dtype,
    ops: Ops,
    form: ExpertForm = PLAIN_EXPERTS,
) -> ExpertMLP:
    """Returns experts on a CPU whose matrices are in groups, for tokens of `dtype`.

    The matrices are [2 * size, hidden], the gate's first, and [hidden, size]; each is needed only
    until the next one is taken.
    """
    device = torch.device("cpu")
    gates: list[GatedWeight] = []
    for i, matrix in enumerate(gate_up):
        if _is_plain_gate(form):
            gates.append(pack_grouped_gated(matrix, device, dtype, form.gate, _gate_op(form, ops)))
        else:
            gates.append(_with_gate(pack_grouped(matrix, device, dtype), form, i, ops))
    downs = (pack_grouped(matrix, device, dtype) for matrix in down)
    return PackedExperts(gates, [_with_down_bias(each, form, i) for i, each in enumerate(downs)])


def _pack_gates(weight: Tensor, form: ExpertForm, expert: int, ops: Ops) -> GatedWeight:
    """Returns the first matrix of an expert, [2 * size, hidden], with its gate."""
    if _is_plain_gate(form):
        return pack_gated(weight, form.gate, _gate_op(form, ops))
    return _with_gate(pack(weight), form, expert, ops)


def _is_plain_gate(form: ExpertForm) -> bool:
    return form.gate_up_bias is None and form.clamp is None


def _gate_op(form: ExpertForm, ops: Ops) -> Callable[[Tensor], Tensor]:
    return ops.silu_and_mul if form.gate == "silu" else ops.gelu_and_mul


def _with_gate(weight: LinearWeight, form: ExpertForm, expert: int, ops: Ops) -> GatedWeight:
    bias = None if form.gate_up_bias is None else form.gate_up_bias[expert]
    clamp = form.clamp
    if clamp is None:
        return GatedInTwo(weight, form.gate, _gate_op(form, ops), bias)
    return GatedInTwo(weight, clamp, lambda x: ops.clamp_and_mul(x, clamp), bias)


def _with_down_bias(weight: LinearWeight, form: ExpertForm, expert: int) -> LinearWeight | Biased:
    return weight if form.down_bias is None else Biased(weight, form.down_bias[expert])
