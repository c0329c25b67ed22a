"""Which stages the native library runs in one call, and that a stage is sound.

The library follows addresses and checks nothing, so all of it is checked here, once, before any
address is taken. A stage that merely has other forms of weights is left to layer by layer; one
whose tensors do not fit each other is an error.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.layer import AttentionWeights, LayerWeights, StageWeights
from kernels.linear_weight import GatedWeight, LinearWeight
from kernels.native.call import ELEMENT
from kernels.native.groups import NativeGated, NativeLinear
from kernels.native.linear import NativeGatedWeight, NativeWeight


def native_part(stage: StageWeights) -> StageWeights | None:
    """Returns what the library runs of `stage`; None if it does not have the form of its layers.

    All matrices must be packed for the library and all layers of the same sizes. A head whose
    matrix is not packed for it is left out.
    """
    if not all(_is_native(layer) for layer in stage.layers):
        return None
    if len({_sizes(layer) for layer in stage.layers}) != 1:
        return None
    if stage.head is None or isinstance(stage.head.weight, NativeLinear):
        return stage
    return dataclasses.replace(stage, head=None)


def check(stage: StageWeights, dtype: torch.dtype) -> None:
    """Raises ValueError for a tensor that the library would misread where hidden states are of
    `dtype`. `stage` is one that `native_part` has returned."""
    if dtype not in ELEMENT:
        raise ValueError(f"the native library does not compute with {dtype}")
    hidden_size, head_dim = hidden_size_of(stage), stage.layers[0].attention.head_dim
    for layer in stage.layers:
        _check_layer(layer, dtype)
    if stage.head is not None:
        _check_norm(stage.head.norm.weight, hidden_size)
        _check_weight(stage.head.weight, dtype)
        if stage.head.weight.shape[1] != hidden_size:
            raise ValueError("a head for other hidden states than those of the layers")
    if stage.table is not None:
        _check_table(stage.table, (hidden_size,), dtype)
    _check_table(stage.angles.cos, (1, head_dim), dtype)
    _check_table(stage.angles.sin, (1, head_dim), dtype)
    if len(stage.angles.cos) != len(stage.angles.sin):
        raise ValueError("cosines and sines of different positions")


def hidden_size_of(stage: StageWeights) -> int:
    """Returns the size of what goes from layer to layer."""
    return stage.layers[0].attention.qkv.weight.shape[1]


def _is_native(layer: LayerWeights) -> bool:
    attention, mlp = layer.attention, layer.mlp
    weights = attention.qkv.weight, attention.output.weight, mlp.down.weight
    return isinstance(mlp.gate_up, NativeGated) and all(
        isinstance(weight, NativeLinear) for weight in weights
    )


def _sizes(layer: LayerWeights) -> tuple[int, ...]:
    """Returns what layers that run in one call have in common."""
    attention, mlp = layer.attention, layer.mlp
    gate_up = mlp.gate_up
    if not isinstance(gate_up, NativeGated):
        raise TypeError(f"{type(gate_up).__name__} is no weight of the native library")
    matrices = attention.qkv.weight, attention.output.weight, gate_up, mlp.down.weight
    heads = attention.n_heads, attention.n_kv_heads, attention.head_dim
    return (*heads, *(size for matrix in matrices for size in matrix.shape))


def _check_layer(layer: LayerWeights, dtype: torch.dtype) -> None:
    attention, mlp = layer.attention, layer.mlp
    projections = attention.qkv, attention.output, mlp.down
    for weight in (*(each.weight for each in projections), mlp.gate_up):
        _check_weight(weight, dtype)
    for bias in (each.bias for each in projections):
        if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
            raise ValueError(f"a bias of {bias.dtype} where layers are {dtype}")
    hidden_size = attention.qkv.weight.shape[1]
    _check_norm(layer.attention_norm.weight, hidden_size)
    _check_norm(layer.mlp_norm.weight, hidden_size)
    _check_sinks(attention)
    heads = attention.head_norms
    if heads is not None:
        _check_norm(heads.q, attention.head_dim)
        _check_norm(heads.k, attention.head_dim)
        if heads.q.dtype != heads.k.dtype:
            raise ValueError("norms of queries and of keys of different types")


def _check_sinks(attention: AttentionWeights) -> None:
    sinks = attention.sinks
    if sinks is None:
        return
    is_dense = sinks.shape == (attention.n_heads,) and sinks.is_contiguous()
    if sinks.dtype != torch.float32 or not is_dense:
        raise ValueError(
            f"sinks {tuple(sinks.shape)} of {sinks.dtype} where layers need {attention.n_heads} of "
            "float32"
        )


def _check_weight(weight: LinearWeight | GatedWeight, dtype: torch.dtype) -> None:
    if not isinstance(weight, NativeWeight | NativeGatedWeight):
        return  # of numbers, which multiply tokens of every type
    if weight.packed.dtype != dtype:
        raise ValueError(f"a weight of {weight.packed.dtype} where layers are {dtype}")


def _check_norm(norm: Tensor, size: int) -> None:
    if norm.shape != (size,) or norm.dtype not in ELEMENT or not norm.is_contiguous():
        raise ValueError(
            f"a norm {tuple(norm.shape)} of {norm.dtype} with strides {norm.stride()} where layers "
            f"need {size} elements"
        )


def _check_table(table: Tensor, row: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError for a table whose rows are not dense, of `dtype` and of the shape `row`."""
    if table.dtype != dtype or table.shape[1:] != row or not table.is_contiguous():
        raise ValueError(
            f"a table of rows {tuple(table.shape[1:])} of {table.dtype} where layers need "
            f"{row} of {dtype}"
        )
