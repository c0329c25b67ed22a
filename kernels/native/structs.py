"""The structures of `src/layers.cpp`, field for field, and how they are filled.

They hold addresses: whoever fills one keeps the tensors.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native.call import ELEMENT
from kernels.native.linear import NativeInt8GatedWeight, NativeInt8Weight
from kernels.native.stage import Gated, NativeHead, NativeLayer, NativeStage, Projection

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class WeightStruct(ctypes.Structure):
    _fields_ = (
        ("packed", _pointer),
        ("starts", _pointer),
        ("scales", _pointer),
        ("bias", _pointer),
        ("n_in", _int),
        ("n_out", _int),
        ("finish", _int),
    )


class NormStruct(ctypes.Structure):
    _fields_ = (("element", _int), ("weight", _pointer), ("eps", _float))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("attention_norm", NormStruct),
        ("qkv", WeightStruct),
        ("query_norm", NormStruct),
        ("key_norm", NormStruct),
        ("output", WeightStruct),
        ("mlp_norm", NormStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("window", _int),
        ("scale", _float),
        ("soft_cap", _float),
    )


class HeadStruct(ctypes.Structure):
    _fields_ = (("norm", NormStruct), ("weight", WeightStruct))


class SizesStruct(ctypes.Structure):
    _fields_ = tuple(
        (name, _int) for name in ("element", "n_layers", "n_heads", "n_kv_heads", "head_dim")
    )


class TablesStruct(ctypes.Structure):
    _fields_ = (
        ("rows", _pointer),
        ("n_rows", _int),
        ("cos", _pointer),
        ("sin", _pointer),
        ("n_positions", _int),
    )


class StageStruct(ctypes.Structure):
    _fields_ = (
        ("sizes", SizesStruct),
        ("tables", TablesStruct),
        ("layers", _pointer),
        ("head", _pointer),
    )


class BatchStruct(ctypes.Structure):
    _fields_ = (
        ("n_tokens", _int),
        ("ids", _pointer),
        ("positions", _pointer),
        ("slots", _pointer),
        ("starts", _pointer),
        ("counts", _pointer),
        ("blocks", _pointer),
        ("n_spans", _int),
        ("n_columns", _int),
        ("kv", _pointer),
        ("block_size", _int),
        ("hidden", _pointer),
        ("memory", _pointer),
        ("sampled", _pointer),
        ("n_sampled", _int),
        ("logits", _pointer),
        ("likeliest", _pointer),
    )


class Seconds(ctypes.Structure):
    """What the calls of one `NativeLayers` have taken, by kind of operation."""

    _fields_ = (
        ("linear", ctypes.c_double),
        ("attention", ctypes.c_double),
        ("sampling", ctypes.c_double),
        ("other", ctypes.c_double),
    )

    linear: float
    attention: float
    sampling: float
    other: float


def sizes_struct(stage: NativeStage, dtype: torch.dtype) -> SizesStruct:
    layer = stage.layers[0]
    n_layers = len(stage.layers)
    return SizesStruct(ELEMENT[dtype], n_layers, layer.n_heads, layer.n_kv_heads, layer.head_dim)


def tables_struct(stage: NativeStage) -> TablesStruct:
    table, angles = stage.table, stage.angles
    return TablesStruct(
        None if table is None else table.data_ptr(),
        0 if table is None else len(table),
        angles.cos.data_ptr(),
        angles.sin.data_ptr(),
        len(angles.cos),
    )


def head_struct(head: NativeHead) -> HeadStruct:
    return HeadStruct(_norm(head.norm, head.eps), _weight(head.weight))


def layer_struct(layer: NativeLayer) -> LayerStruct:
    form, heads = layer.form, layer.head_norms
    return LayerStruct(
        _norm(layer.attention_norm, layer.attention_eps),
        _weight(layer.qkv, layer.qkv_bias),
        NormStruct() if heads is None else _norm(heads.q, heads.eps),
        NormStruct() if heads is None else _norm(heads.k, heads.eps),
        _weight(layer.output, layer.output_bias),
        _norm(layer.mlp_norm, layer.mlp_eps),
        _weight(layer.gate_up),
        _weight(layer.down, layer.down_bias),
        form.window or 0,
        layer.head_dim**-0.5 if form.scale is None else form.scale,
        form.soft_cap or 0.0,
    )


def _norm(weight: Tensor, eps: float) -> NormStruct:
    return NormStruct(ELEMENT[weight.dtype], weight.data_ptr(), eps)


def _weight(weight: Projection | Gated, bias: Tensor | None = None) -> WeightStruct:
    n_out, n_in = weight.shape
    finish = weight.gate if isinstance(weight, Gated) else 0
    bias_address = None if bias is None else bias.data_ptr()
    if isinstance(weight, NativeInt8Weight | NativeInt8GatedWeight):
        panels = weight.panels
        return WeightStruct(
            panels.packed.data_ptr(),
            panels.starts.data_ptr(),
            panels.scales.data_ptr(),
            bias_address,
            n_in,
            n_out,
            finish,
        )
    return WeightStruct(weight.packed.data_ptr(), None, None, bias_address, n_in, n_out, finish)
