"""Packs the experts of a mixture-of-experts layer in the form that is fastest on their device.

On a CPU with the native library, `kernels.packing.linear` packs each matrix separately. Elsewhere
the matrices of all experts stay stacked in two tensors, for `Ops.expert_mlp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kernels.forms.experts import PLAIN_EXPERTS, ExpertForm, StackedExperts
from kernels.native.linear import can_pack
from kernels.packing.linear import pack, pack_gated, pack_grouped, pack_grouped_gated
from kernels.steps import Expert, ExpertMatrices, Gated
from kernels.weights.gated_in_two import GatedInTwo, GatedMatrix
from kernels.weights.groups import GroupedMatrix
from kernels.weights.linear import LinearWeight


def pack_experts(gate_up: Tensor, down: Tensor, form: ExpertForm = PLAIN_EXPERTS) -> ExpertMatrices:
    """Returns experts in the form that is fastest on the device of the matrices.

    `gate_up` is [n_experts, 2 * size, hidden], the gate's matrix first, and `down` is
    [n_experts, hidden, size].
    """
    if not can_pack(down):
        return StackedExperts(gate_up, down, form)
    both = zip(gate_up, down, strict=True)
    return [
        _expert(_pack_gates(first, form, i), pack(second), form, i)
        for i, (first, second) in enumerate(both)
    ]


def pack_grouped_experts(
    gate_up: Iterable[GroupedMatrix],
    down: Iterable[GroupedMatrix],
    dtype: torch.dtype,
    form: ExpertForm = PLAIN_EXPERTS,
) -> Sequence[Expert]:
    """Packs experts whose matrices are quantised in groups, on a CPU, for tokens of `dtype`.

    A matrix of `gate_up` is [2 * size, hidden], the gate's rows first. A matrix of `down` is
    [hidden, size]. Matrices are packed one after the other: a matrix may be freed when the next one
    is taken from `gate_up` or `down`.
    """
    device = torch.device("cpu")
    gates: list[GatedMatrix] = []
    for i, matrix in enumerate(gate_up):
        if _is_plain_gate(form):
            gates.append(pack_grouped_gated(matrix, device, dtype, form.gate))
        else:
            gates.append(_with_gate(pack_grouped(matrix, device, dtype), form, i))
    downs = (pack_grouped(matrix, device, dtype) for matrix in down)
    both = zip(gates, downs, strict=True)
    return [_expert(first, second, form, i) for i, (first, second) in enumerate(both)]


def _expert(gate_up: GatedMatrix, down: LinearWeight, form: ExpertForm, index: int) -> Expert:
    bias = None if form.down_bias is None else form.down_bias[index]
    return Expert(Gated.of(gate_up), down, bias)


def _pack_gates(weight: Tensor, form: ExpertForm, index: int) -> GatedMatrix:
    """Returns the packed gate and up matrices `weight` [2 * size, hidden] of the expert `index`,
    with the gate function of `form`."""
    if _is_plain_gate(form):
        return pack_gated(weight, form.gate)
    return _with_gate(pack(weight), form, index)


def _is_plain_gate(form: ExpertForm) -> bool:
    return form.gate_up_bias is None and form.clamp is None


def _with_gate(weight: LinearWeight, form: ExpertForm, index: int) -> GatedInTwo:
    bias = None if form.gate_up_bias is None else form.gate_up_bias[index]
    return GatedInTwo(weight, form.clamp or form.gate, bias)
