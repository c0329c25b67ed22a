"""Steps that mix the tokens of a sequence, and so use the storage of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.head_norms import HeadNorms
from kernels.steps.buffer import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads in a fused projection: a token's queries, keys and values one after the other."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RotaryWriteKV:
    """Computes `kernels.rotary_write_kv`; the queries stay where they are."""

    qkv: Buffer
    cos: Buffer
    sin: Buffer
    heads: Heads
    norms: HeadNorms | None
    layer: int  # whose storage keys and values go to


@dataclass(frozen=True, slots=True)
class WriteKV:
    """Computes `kernels.write_kv`."""

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
    out: Buffer
