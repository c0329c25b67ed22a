"""The one description of a stage of a decoder that descends from Llama, layer by layer.

It says which tensors a layer has, in which form, and what its attention computes; it neither runs
nor loads anything. Models derive their layers from these classes and run them operation by
operation. An implementation that runs a whole stage in one call (`Ops.fuse_layers`) reads the same
objects: the native library's structures are derived from the fields of these classes, so what is
added here is there as well, in the order of the fields.

A layer normalises the residual stream, adds attention to it, normalises again and adds a gated MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.head_norms import HeadNorms
from kernels.linear_weight import GatedWeight, LinearWeight


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm, as `kernels.rms_norm` computes it."""

    weight: Tensor  # [size], float32 or of the type of what it normalises
    eps: float


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer."""

    weight: LinearWeight  # [n_out, n_in]
    bias: Tensor | None  # [n_out]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Grouped-query attention over paged K/V; a rank that shares the layer has a part of it."""

    qkv: Projection  # to a token's queries, keys and values, one after the other
    output: Projection
    n_heads: int
    n_kv_heads: int
    head_dim: int
    form: AttentionForm
    head_norms: HeadNorms | None = None  # of queries and keys, before they turn
    sinks: Tensor | None = None  # [n_heads] float32, scores beside those of keys


@dataclass(frozen=True, slots=True)
class GatedMLPWeights:
    """An MLP `down(gate_up(x))`, whose first half gates itself."""

    gate_up: GatedWeight
    down: Projection


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: attention and an MLP, each behind a norm."""

    attention_norm: Norm
    attention: AttentionWeights
    mlp_norm: Norm
    mlp: GatedMLPWeights
    group: int = 0  # of the batch's K/V groups, the one that its storage belongs to


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head: a norm and then a product, from the last hidden states to logits."""

    norm: Norm
    weight: LinearWeight  # [vocab_size, hidden_size]


@dataclass(slots=True)
class Angles:
    """The angles of the positions from 0 on, as `kernels.rotary` takes those of a token's.

    Longer tables take the place of these before a batch has a position beyond them.
    """

    cos: Tensor  # [n_positions, 1, head_dim], as the next
    sin: Tensor


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Consecutive layers, and what is around them where that is plain enough to be described."""

    table: Tensor | None  # [vocab_size, hidden_size], rows of tokens; None: hidden states come in
    angles: Angles
    layers: Sequence[LayerWeights]  # at least one
    head: HeadWeights | None  # None: hidden states go out
