"""Steps of attention and of Gated DeltaNet. Most of them read or write the storage of a layer."""

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
    """The numbers of heads in a row of a fused projection, and their size. The row holds a token's
    queries, then keys, then values."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RotaryWriteKV:
    """Rotates queries and keys in `qkv`, and stores keys and values (`Ops.rotary_write_kv`). The
    rotated queries replace the queries in `qkv`."""

    qkv: Buffer
    cos: Buffer
    sin: Buffer
    heads: Heads
    norms: HeadNorms | None
    layer: int  # the layer in whose storage keys and values are stored


@dataclass(frozen=True, slots=True)
class WriteKV:
    """Stores the keys and values in `qkv` in the storage of a layer (`Ops.write_kv`)."""

    qkv: Buffer
    heads: Heads
    layer: int


@dataclass(frozen=True, slots=True)
class Attend:
    """Computes attention over the keys and values in the storage of a layer."""

    qkv: Buffer
    heads: Heads
    form: AttentionForm
    sinks: Tensor | None  # [n_heads] float32
    layer: int
    n_shared: int  # number of first elements of a key that are the value; 0: values are stored, too
    out: Buffer


@dataclass(frozen=True, slots=True)
class TurnHeads:
    """Rotates the last elements of each head of `x` (`Ops.rotary`), and writes the result to the
    last elements of each head of `out`, which may be `x`."""

    x: Buffer
    cos: Buffer
    sin: Buffer
    n_heads: int
    out: Buffer


@dataclass(frozen=True, slots=True)
class MultiplyHeads:
    """Multiplies the first elements of each head of `x` by the head's matrix (`HeadProducts`), and
    writes the products to the first elements of each head of `out`."""

    x: Buffer
    weight: HeadProducts
    out: Buffer


@dataclass(frozen=True, slots=True)
class WriteLatents:
    """Stores each row of `x` as a key of a layer that has one K/V head and no separate values."""

    x: Buffer
    layer: int


@dataclass(frozen=True, slots=True)
class RunDeltaNet:
    """Computes the recurrent part of a Gated DeltaNet layer (`Ops.delta_net`), and updates the
    states in the layer's storage."""

    projected: Buffer
    form: DeltaNetForm
    kernel_size: int
    length_eps: float
    layer: int
    out: Buffer
