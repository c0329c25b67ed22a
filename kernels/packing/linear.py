"""Linear layers whose weights lie in memory in the order in which they are computed with.

`pack(weight)` picks the form by device and element type, and the plain weight is not needed any
more. On a CPU the native library's form comes first: at 1 to 16 tokens it is 1.2 to 1.8 times
as fast as oneDNN's, and as fast at 512 (`benchmarks.engine.linear`). Its sums of a token do not
depend on how many others there are (`docs/determinism.md`), which others do not promise. Where the
library is not built, oneDNN gets the weight in blocks of its own choice, once, instead of with
every call. On a GPU it stays as it is, for cuBLAS.

With `quantization` a matrix becomes numbers of 8 or 4 bits, a half or a quarter of the memory to
read. They are multiplied as they are (`pack_grouped` says the same of numbers that a checkpoint
has): by the native library on a CPU, by Triton on a GPU. Inputs stay what they are, but for "int8"
where a CPU has VNNI: there they become int8 with a scale for each token when they are multiplied,
and sums are exact, which is twice the products per instruction. Embeddings and heads are in groups
wherever they are quantised, and so is everything of 4 bits.

A residual is added to the sums before they are rounded, so that fusing it makes results no worse.
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
    """Whether weights on `device` can be quantised like this."""
    return quantization == "none" or can_group(device)


def can_group(device: torch.device) -> bool:
    """Whether `pack_grouped` has forms on `device`."""
    return _group_forms(device.type) is not None


def pack(weight: Tensor, quantization: Quantization = "none") -> LinearWeight:
    """Returns `weight` [n_out, n_in] in the form that is fastest where it lies.

    A weight without storage (a meta tensor) or without elements is not quantised.

    Raises:
        ValueError: it cannot be quantised here.
    """
    if _is_quantised(weight, quantization):
        forms = _int8_forms(weight.device.type) if quantization == "int8" else None
        if forms is not None and forms.can_take(weight):
            return forms.plain(weight)
        return pack_grouped(in_groups(weight, _BITS[quantization]), weight.device, weight.dtype)
    if can_pack(weight):
        return NativeWeight.of(weight)
    return OneDnnWeight.of(weight) if _suits_one_dnn(weight) else _plain(weight)


def pack_table(weight: Tensor, quantization: Quantization = "none") -> TableWeight:
    """Returns `weight` [n_rows, size] in the fastest form that can be looked up in as well.

    Raises:
        ValueError: it cannot be quantised here.
    """
    if _is_quantised(weight, quantization):
        return pack_grouped(in_groups(weight, _BITS[quantization]), weight.device, weight.dtype)
    return NativeWeight.of(weight) if can_pack(weight) else _plain(weight)


def pack_gated(weight: Tensor, gate: Gate, quantization: Quantization = "none") -> GatedMatrix:
    """Returns `weight` [2 * n_out, n_in] in the fastest form: the gate's matrix comes first."""
    if _is_quantised(weight, quantization):
        forms = _int8_forms(weight.device.type) if quantization == "int8" else None
        if forms is None:
            matrix = in_groups(weight, _BITS[quantization])
            return pack_grouped_gated(matrix, weight.device, weight.dtype, gate)
        if forms.can_take_gated(weight):
            return forms.gated(weight, gate)
    elif can_gate(weight):
        return NativeGatedWeight.of(weight, gate)
    return GatedInTwo(pack(weight, quantization), gate)


def pack_grouped(matrix: GroupedMatrix, device: torch.device, dtype: torch.dtype) -> TableWeight:
    """Returns a matrix in groups on `device`, for tokens of `dtype`, which are also its rows.

    Raises:
        ValueError: there is no form for it.
    """
    forms = _group_forms(device.type)
    if forms is None or not forms.can_take(matrix, dtype):
        raise ValueError(f"no form for {matrix.form} {list(matrix.shape)}, {dtype} on {device}")
    return forms.plain(matrix.to(device), dtype)


def pack_grouped_gated(
    matrix: GroupedMatrix, device: torch.device, dtype: torch.dtype, gate: Gate
) -> GatedMatrix:
    """Returns a matrix [2 * n_out, n_in] in groups with its gate, whose rows come first.

    `pack_grouped` describes the other arguments and the errors.
    """
    forms = _group_forms(device.type)
    if forms is not None and forms.can_take_gated(matrix, dtype):
        return forms.gated(matrix.to(device), dtype, gate)
    return GatedInTwo(pack_grouped(matrix, device, dtype), gate)


@dataclass(frozen=True, slots=True)
class _Int8Forms:
    """The forms that a kind of device has for int8, and which matrices they take."""

    can_take: Callable[[Tensor], bool]
    plain: Callable[[Tensor], LinearWeight]
    can_take_gated: Callable[[Tensor], bool]
    gated: Callable[[Tensor, Gate], GatedWeight]


@cache
def _int8_forms(device_type: str) -> _Int8Forms | None:
    """Returns the forms of a kind of device with a scale for each output; None without any."""
    if device_type == "cpu" and has_int8():
        return _Int8Forms(
            can_quantise, NativeInt8Weight.of, can_quantise_gated, NativeInt8GatedWeight.of
        )
    if device_type == "cuda" and find_spec("triton") is not None:
        # Not above: without Triton there is nothing to import, and on a CPU it is for nothing.
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
    """The forms that a kind of device has for weights in groups, and which matrices they take."""

    can_take: Callable[[GroupedMatrix, torch.dtype], bool]
    plain: Callable[[GroupedMatrix, torch.dtype], TableWeight]
    can_take_gated: Callable[[GroupedMatrix, torch.dtype], bool]
    gated: Callable[[GroupedMatrix, torch.dtype, Gate], GatedWeight]


@cache
def _group_forms(device_type: str) -> _GroupForms | None:
    """Returns the forms of a kind of device; None where there are none."""
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
