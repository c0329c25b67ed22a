"""What the native library computes a stage with: the weights of its layers and of what is around
them, and which it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_metadata import AttentionForm
from kernels.head_norms import HeadNorms
from kernels.native.call import ELEMENT
from kernels.native.linear import (
    NativeGatedWeight,
    NativeInt8GatedWeight,
    NativeInt8Weight,
    NativeWeight,
)

Projection = NativeWeight | NativeInt8Weight
Gated = NativeGatedWeight | NativeInt8GatedWeight


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """The weights of one layer: attention, then a gated MLP, each on the normalised residual."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    attention_norm: Tensor  # [hidden_size]
    attention_eps: float
    qkv: Projection
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    form: AttentionForm
    output: Projection
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden_size]
    mlp_eps: float
    gate_up: Gated
    down: Projection
    down_bias: Tensor | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """What layers that run at once have in common."""
        inside = (*self.qkv.shape, *self.output.shape, *self.gate_up.shape, *self.down.shape)
        return self.n_heads, self.n_kv_heads, self.head_dim, *inside

    def refuse_others_than(self, dtype: torch.dtype) -> None:
        """Raises ValueError if a weight or bias is not of `dtype`, or int8, or norms of heads
        differ."""
        for weight in (self.qkv, self.output, self.gate_up, self.down):
            _refuse_others_than(dtype, weight)
        for bias in (self.qkv_bias, self.output_bias, self.down_bias):
            if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
                raise ValueError(f"a bias of {bias.dtype} where layers are {dtype}")
        if self.head_norms is not None and self.head_norms.q.dtype != self.head_norms.k.dtype:
            raise ValueError("norms of queries and of keys of different types")

    def norms(self) -> list[Tensor]:
        """What norms multiply by."""
        heads = [] if self.head_norms is None else [self.head_norms.q, self.head_norms.k]
        return [self.attention_norm, self.mlp_norm, *heads]


@dataclass(frozen=True, slots=True)
class NativeHead:
    """What makes logits of the last layer's hidden states."""

    norm: Tensor  # [hidden_size]
    eps: float
    weight: Projection  # [vocab_size, hidden_size]


@dataclass(frozen=True, slots=True)
class NativeAngles:
    """Angles of every position, as `kernels.rotary` takes those of a token's."""

    cos: Tensor  # [n_positions, 1, head_dim], as the next
    sin: Tensor


@dataclass(frozen=True, slots=True)
class NativeStage:
    """What one call computes with."""

    table: Tensor | None  # [vocab_size, hidden_size], whose rows are tokens
    angles: NativeAngles
    layers: Sequence[NativeLayer]  # of the same sizes
    head: NativeHead | None

    @property
    def hidden_size(self) -> int:
        """Size of what goes from layer to layer."""
        return self.layers[0].qkv.shape[1]

    def refuse_others_than(self, dtype: torch.dtype) -> None:
        """Raises ValueError if something is not what the library takes where hidden states are of
        `dtype`: it does not look itself."""
        if len({layer.sizes for layer in self.layers}) != 1:
            raise ValueError("layers of different sizes, or none")
        if dtype not in ELEMENT:
            raise ValueError(f"the native library does not compute with {dtype}")
        norms = [norm for layer in self.layers for norm in layer.norms()]
        for layer in self.layers:
            layer.refuse_others_than(dtype)
        if self.head is not None:
            norms.append(self.head.norm)
            _refuse_others_than(dtype, self.head.weight)
            if self.head.weight.shape[1] != self.hidden_size:
                raise ValueError("a head for other hidden states than those of the layers")
        for norm in norms:
            if norm.dtype not in ELEMENT or not norm.is_contiguous():
                raise ValueError(f"a norm of {norm.dtype} with strides {norm.stride()}")
        self._refuse_other_tables(dtype)

    def _refuse_other_tables(self, dtype: torch.dtype) -> None:
        for table, row in self._tables():
            if table.dtype != dtype or table.shape[1:] != row or not table.is_contiguous():
                raise ValueError(
                    f"a table of rows {tuple(table.shape[1:])} of {table.dtype} where layers need "
                    f"{row} of {dtype}"
                )
        if len(self.angles.cos) != len(self.angles.sin):
            raise ValueError("cosines and sines of different positions")

    def _tables(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """What is looked up, and the shape of its rows."""
        angle = (1, self.layers[0].head_dim)
        tables: list[tuple[Tensor, tuple[int, ...]]] = []
        tables += (self.angles.cos, angle), (self.angles.sin, angle)
        if self.table is not None:
            tables.append((self.table, (self.hidden_size,)))
        return tables


def _refuse_others_than(dtype: torch.dtype, weight: Projection | Gated) -> None:
    if isinstance(weight, NativeInt8Weight | NativeInt8GatedWeight):
        return  # which is for all
    if weight.packed.dtype != dtype:
        raise ValueError(f"a weight of {weight.packed.dtype} where layers are {dtype}")
