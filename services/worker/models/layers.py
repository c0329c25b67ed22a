"""Layers that model families share, built from a checkpoint's tensors, run on flat batches.

Plain objects that hold tensors, not `torch.nn.Module`s: nothing here is trained, moved or hooked,
and an attribute look-up of a module costs as much as a small kernel. A layer that reads a fused
weight (query, key and value; gate and up) reads its parts one after the other and joins them.

All tensors are [n_tokens, ...]: requests are only seen inside the attention operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionMetadata, Ops
from services.worker.models.config import ModelConfig, RopeConfig
from services.worker.models.stage import LayerKV
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`."""

    weight: Tensor  # [n_out, n_in]
    bias: Tensor | None  # [n_out]

    @classmethod
    def read(
        cls, source: TensorSource, names: Sequence[str], *, n_in: int, n_out: Sequence[int],
        has_bias: bool,
    ) -> Self:  # fmt: skip
        """Reads the projections `names`, of `n_out` outputs each, as one."""
        weights = [
            source.tensor(f"{name}.weight", size, n_in)
            for name, size in zip(names, n_out, strict=True)
        ]
        biases = [
            source.tensor(f"{name}.bias", size)
            for name, size in zip(names, n_out, strict=True)
            if has_bias
        ]
        return cls(_joined(weights), _joined(biases) if has_bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # [n_tokens, n_out]


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square normalisation with a learned scale."""

    weight: Tensor  # [hidden]
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)  # [n_tokens, hidden]


class RotaryEmbedding:
    """Angles of positions, in the form that the rotary operation takes."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [n_tokens, 1, head_dim] of `positions` [n_tokens].

        The angles are computed in float32 and only then rounded: at position 4,000 a bfloat16
        angle would be off by whole turns.
        """
        angles = positions[:, None].float() * self._frequencies  # [n_tokens, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), -1).unsqueeze(1).to(self._dtype),
            torch.cat((-sin, sin), -1).unsqueeze(1).to(self._dtype),
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of elements, [head_dim / 2], float32.

    "linear" divides all by the factor (Chen et al., 2023). "llama3" (the Llama 3.1 release) divides
    only the waves that do not fit `low_freq_factor` times into the original context, leaves those
    that fit `high_freq_factor` times, and goes over smoothly in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "linear":
        return frequencies / _given(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    factor = _given(rope.factor)
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    n_waves = _given(rope.original_max_position_embeddings) * frequencies / (2 * math.pi)
    share_kept = ((n_waves - low) / (high - low)).clamp(0, 1)
    return (1 - share_kept) * frequencies / factor + share_kept * frequencies


def _given(value: float | None) -> float:
    if value is None:
        raise ValueError("a rotary setting is missing that RopeConfig guarantees for its type")
    return value


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """What attention must know of the batch, the same in every layer."""

    cos: Tensor  # [n_tokens, 1, head_dim]
    sin: Tensor  # [n_tokens, 1, head_dim]
    slots: Tensor  # [n_tokens]
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention with rotary positions over paged K/V."""

    qkv: Linear
    output: Linear
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ops: Ops

    @classmethod
    def read(cls, source: TensorSource, prefix: str, config: ModelConfig, ops: Ops) -> Self:
        """Reads `q_proj`, `k_proj`, `v_proj` and `o_proj` under `prefix`."""
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        qkv = Linear.read(
            source,
            [f"{prefix}.{name}_proj" for name in "qkv"],
            n_in=config.hidden_size,
            n_out=(n_q, n_kv, n_kv),
            has_bias=config.attention_bias,
        )
        output = Linear.read(
            source,
            [f"{prefix}.o_proj"],
            n_in=n_q,
            n_out=(config.hidden_size,),
            has_bias=config.attention_bias,
        )
        return cls(qkv, output, config.n_heads, config.n_kv_heads, config.head_dim, ops)

    def __call__(self, x: Tensor, batch: BatchGeometry, kv: LayerKV) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # q, k and v heads
        v = heads[:, self.n_heads + self.n_kv_heads :]  # [n_tokens, n_kv_heads, head_dim]
        # Queries and keys turn by the same angles, so they turn together.
        turned = self.ops.rotary(heads[:, : -self.n_kv_heads], batch.cos, batch.sin)
        q = turned[:, : self.n_heads]  # [n_tokens, n_heads, head_dim]
        k = turned[:, self.n_heads :]  # [n_tokens, n_kv_heads, head_dim]
        keys, values = kv
        self.ops.write_kv(k, v, keys, values, batch.slots)
        attended = self.ops.attention(q, k, v, keys, values, batch.attention)
        return self.output(attended.flatten(1))  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`."""

    gate_up: Linear
    down: Linear
    ops: Ops

    @classmethod
    def read(cls, source: TensorSource, prefix: str, config: ModelConfig, ops: Ops) -> Self:
        """Reads `gate_proj`, `up_proj` and `down_proj` under `prefix`."""
        gate_up = Linear.read(
            source,
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
            n_in=config.hidden_size,
            n_out=(config.intermediate_size, config.intermediate_size),
            has_bias=config.mlp_bias,
        )
        down = Linear.read(
            source,
            [f"{prefix}.down_proj"],
            n_in=config.intermediate_size,
            n_out=(config.hidden_size,),
            has_bias=config.mlp_bias,
        )
        return cls(gate_up, down, ops)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_and_mul(self.gate_up(x)))  # [n_tokens, hidden]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
