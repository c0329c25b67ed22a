"""Packs the weights of linear layers in the order in which a product reads them.

`pack(weight)` picks the form by device and element type; the caller may free the plain weight
afterwards. On a CPU the form of the native library is the first choice: at 1 to 16 tokens it is 1.2
to 1.8 times as fast as oneDNN's form, and equally fast at 512 (`benchmarks.engine.linear`). With
the native library the result of a token does not depend on the number of other tokens
(`docs/determinism.md`), which oneDNN and cuBLAS do not promise. Where the library is not built,
oneDNN reorders the weight into blocks once, instead of in every call. On a GPU the weight stays
plain, for cuBLAS.

With `quantization` each weight becomes a number of 8 or 4 bits, so that a product reads about a
half or a quarter of the bytes that it would read in bfloat16. Weights stay quantised while they are
multiplied, by the native library on a CPU and by Triton on a GPU. `pack_grouped` takes weights that
are quantised in the checkpoint.

With the `activations` "rounded", a CPU also rounds the inputs of some products to int8, so that
sums of products are exact integers and an instruction computes two to four times as many products.
For weights of 4 bits in groups, each run of 32 inputs of a token has a scale. For "int8" on a CPU
with VNNI, each token has a scale. All other products do not round their inputs, and with "exact" no
product does. Embeddings and heads are quantised in groups of inputs, and so are all weights of 4
bits.

A residual is added to the sums before rounding, so that fusing the addition loses no precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.native import groups as native_groups
from kernels.native.groups import NativeGroupsGatedWeight, NativeGroupsWeight
from kernels.native.linear import (
    NativeGatedWeight,
    NativeInt8GatedWeight,
    NativeInt8Weight,
    NativeWeight,
    can_gate,
    can_pack,
    can_quantise,
    can_quantise_gated,
    has_int8,
)
from kernels.pytorch.linear import CublasWeight, OneDnnWeight
from kernels.weights.gated_in_two import GatedInTwo, GatedMatrix
from kernels.weights.groups import Bits, GroupedMatrix
from kernels.weights.linear import (
    Activations,
    Gate,
    GatedWeight,
    LinearWeight,
    PlainWeight,
    Quantization,
    TableWeight,
)
from kernels.weights.quantise import in_groups

_BITS: dict[Quantization, Bits] = {"int8": 8, "int4": 4}


def can_compute(quantization: Quantization, device: torch.device) -> bool:
    """Returns whether weights can be quantised by `quantization` on `device`. True for `none`."""
    return quantization == "none" or can_group(device)


def can_group(device: torch.device) -> bool:
    """Returns whether `pack_grouped` supports `device`."""
    return _group_forms(device.type) is not None


def pack(
    weight: Tensor, quantization: Quantization = "none", activations: Activations = "rounded"
) -> LinearWeight:
    """Returns `weight` [n_out, n_in] in the form that is fastest on its device.

    A weight without storage (a meta tensor) or without elements is not quantised.

    Raises:
        ValueError: the weight cannot be quantised on its device.
    """
    if _is_quantised(weight, quantization):
        forms = _int8_forms(weight.device.type, quantization, activations)
        if forms is not None and forms.can_take(weight):
            return forms.plain(weight)
        matrix = _in_groups(weight, quantization, activations)
        return pack_grouped(matrix, weight.device, weight.dtype)
    if can_pack(weight):
        return NativeWeight.of(weight)
    return OneDnnWeight.of(weight) if _suits_one_dnn(weight) else _plain(weight)


def pack_table(
    weight: Tensor, quantization: Quantization = "none", activations: Activations = "rounded"
) -> TableWeight:
    """Returns `weight` [n_rows, size] in the fastest form that also allows looking up rows.

    Raises:
        ValueError: the weight cannot be quantised on its device.
    """
    if _is_quantised(weight, quantization):
        matrix = _in_groups(weight, quantization, activations)
        return pack_grouped(matrix, weight.device, weight.dtype)
    return NativeWeight.of(weight) if can_pack(weight) else _plain(weight)


def pack_gated(
    weight: Tensor,
    gate: Gate,
    quantization: Quantization = "none",
    activations: Activations = "rounded",
) -> GatedMatrix:
    """Returns the gate and up matrices `weight` [2 * n_out, n_in] of a gated MLP, the gate's rows
    first, in the form that is fastest on their device."""
    if _is_quantised(weight, quantization):
        forms = _int8_forms(weight.device.type, quantization, activations)
        if forms is None:
            matrix = _in_groups(weight, quantization, activations)
            return pack_grouped_gated(matrix, weight.device, weight.dtype, gate)
        if forms.can_take_gated(weight):
            return forms.gated(weight, gate)
    elif can_gate(weight):
        return NativeGatedWeight.of(weight, gate)
    return GatedInTwo(pack(weight, quantization, activations), gate)


def pack_grouped(matrix: GroupedMatrix, device: torch.device, dtype: torch.dtype) -> TableWeight:
    """Returns a matrix that is quantised in groups, packed on `device`, for tokens of `dtype`.

    Rows that are looked up have the type `dtype`, too.

    Raises:
        ValueError: `device` has no form for the matrix and `dtype`.
    """
    forms = _group_forms(device.type)
    if forms is None or not forms.can_take(matrix, dtype):
        raise ValueError(f"no form for {matrix.form} {list(matrix.shape)}, {dtype} on {device}")
    return forms.plain(matrix.to(device), dtype)


def pack_grouped_gated(
    matrix: GroupedMatrix, device: torch.device, dtype: torch.dtype, gate: Gate
) -> GatedMatrix:
    """Returns the gate and up matrices of a gated MLP, packed with the gate function. `matrix` [2 *
    n_out, n_in] is quantised in groups, and the gate's rows come first.

    `pack_grouped` describes the other arguments and the errors.
    """
    forms = _group_forms(device.type)
    if forms is not None and forms.can_take_gated(matrix, dtype):
        return forms.gated(matrix.to(device), dtype, gate)
    return GatedInTwo(pack_grouped(matrix, device, dtype), gate)


@dataclass(frozen=True, slots=True)
class _Int8Forms:
    """The functions that check and pack int8 matrices on one type of device."""

    can_take: Callable[[Tensor], bool]
    plain: Callable[[Tensor], LinearWeight]
    can_take_gated: Callable[[Tensor], bool]
    gated: Callable[[Tensor, Gate], GatedWeight]


@cache
def _int8_forms(
    device_type: str, quantization: Quantization, activations: Activations
) -> _Int8Forms | None:
    """Returns the functions for int8 matrices with one scale for each output, on a type of device
    and for the given `activations`. Returns None if there are no such functions."""
    if quantization != "int8":
        return None
    if device_type == "cpu" and has_int8() and activations == "rounded":
        return _Int8Forms(
            can_quantise, NativeInt8Weight.of, can_quantise_gated, NativeInt8GatedWeight.of
        )
    if device_type == "cuda" and find_spec("triton") is not None:
        # Imported here, since Triton may not be installed, and a CPU does not need it.
        from kernels.triton import linear_int8

        return _Int8Forms(
            linear_int8.can_quantise,
            linear_int8.TritonInt8Weight.of,
            linear_int8.can_quantise,
            linear_int8.TritonInt8GatedWeight.of,
        )
    return None


@dataclass(frozen=True, slots=True)
class _GroupForms:
    """The functions that check and pack matrices quantised in groups, on one type of device."""

    can_take: Callable[[GroupedMatrix, torch.dtype], bool]
    plain: Callable[[GroupedMatrix, torch.dtype], TableWeight]
    can_take_gated: Callable[[GroupedMatrix, torch.dtype], bool]
    gated: Callable[[GroupedMatrix, torch.dtype, Gate], GatedWeight]


@cache
def _group_forms(device_type: str) -> _GroupForms | None:
    """Returns the functions for matrices quantised in groups on a type of device. Returns None if
    that type has none."""
    if device_type == "cpu" and native_groups.has_groups():
        return _GroupForms(
            native_groups.can_take,
            NativeGroupsWeight.of,
            native_groups.can_gate,
            NativeGroupsGatedWeight.of,
        )
    if device_type == "cuda" and find_spec("triton") is not None:
        # As above.
        from kernels.triton import linear_groups

        return _GroupForms(
            linear_groups.can_take,
            linear_groups.TritonGroupsWeight.of,
            linear_groups.can_take,
            linear_groups.TritonGroupsGatedWeight.of,
        )
    return None


def _in_groups(
    weight: Tensor, quantization: Quantization, activations: Activations
) -> GroupedMatrix:
    matrix = in_groups(weight, _BITS[quantization])
    return matrix.rounding_inputs() if activations == "rounded" else matrix


def _is_quantised(weight: Tensor, quantization: Quantization) -> bool:
    return quantization != "none" and weight.numel() > 0 and not weight.is_meta


def _plain(weight: Tensor) -> PlainWeight:
    return CublasWeight(weight) if weight.device.type == "cuda" else PlainWeight(weight)


def _suits_one_dnn(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not weight.numel():
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    is_fast: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and is_fast)
