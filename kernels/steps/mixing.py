"""Steps that mix the tokens of a sequence, and so use the storage of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.forms.attention import AttentionForm
from kernels.forms.delta_net import DeltaNetForm
from kernels.forms.head_norms import HeadNorms
from kernels.steps.buffer import Buffer
from kernels.weights.head_products import HeadProducts


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads in a fused projection: a token's queries, keys and values one after the other."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RotaryWriteKV:
    """Computes `Ops.rotary_write_kv`; the queries stay where they are."""

    qkv: Buffer
    cos: Buffer
    sin: Buffer
    heads: Heads
    norms: HeadNorms | None
    layer: int  # whose storage keys and values go to


@dataclass(frozen=True, slots=True)
class WriteKV:
    """Computes `Ops.write_kv`."""

    qkv: Buffer
    heads: Heads
    layer: int


@dataclass(frozen=True, slots=True)
class Attend:
    """Computes attention over what a layer has stored."""

    qkv: Buffer
    heads: Heads
    form: AttentionForm
    sinks: Tensor | None  # [n_heads] float32
    layer: int
    n_shared: int  # first elements of a key that are its value; 0: values lie beside keys
    out: Buffer


@dataclass(frozen=True, slots=True)
class TurnHeads:
    """Computes `Ops.rotary` of the last elements of each head, and lets them be the last of
    each head of `out`, which may be `x`."""

    x: Buffer
    cos: Buffer
    sin: Buffer
    n_heads: int
    out: Buffer


@dataclass(frozen=True, slots=True)
class MultiplyHeads:
    """Computes `HeadProducts` of the first elements of each head; they become the first elements of
    each head of `out`."""

    x: Buffer
    weight: HeadProducts
    out: Buffer


@dataclass(frozen=True, slots=True)
class WriteLatents:
    """Stores rows as the keys of one head, and no values."""

    x: Buffer
    layer: int


@dataclass(frozen=True, slots=True)
class RunDeltaNet:
    """Computes `Ops.delta_net` with the states of a layer."""

    projected: Buffer
    form: DeltaNetForm
    kernel_size: int
    length_eps: float
    layer: int
    out: Buffer
