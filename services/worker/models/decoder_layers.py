"""The layers that several decoder families share: attention, MLPs and what holds them together.

Each has what families vary as plain fields, set once when weights are read. `decoder.py` has the
stages that are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, Self

import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionForm, HeadNorms, Ops
from kernels.packed_linear import Gate
from services.worker.models.config import ModelConfig
from services.worker.models.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    read_gated,
)
from services.worker.models.stage import LayerKV, StageBatch
from services.worker.models.tensor_parallel import HeadShare, TensorParallel
from services.worker.models.weights import TensorSource

# By the names of Hugging Face's `activation_function`.
Activation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}

Norm = Callable[[Tensor], Tensor]  # [..., size] to the same shape


class Embedding(Protocol):
    """Tokens [n_tokens] to hidden states [n_tokens, hidden], on every rank."""

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor: ...


class Layer(Protocol):
    """One layer: hidden states [n_tokens, hidden] to the same, its K and V stored on the way."""

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor: ...


class Head(Protocol):
    """Hidden states [n, hidden] after the last layer to logits [n, vocab_size], on every rank."""

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor: ...


class MLP(Protocol):
    """What a layer does to every token by itself, [n_tokens, hidden] to the same.

    A `residual` of the same shape is added to the result, and used up.
    """

    def __call__(
        self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """The rows of tokens, as they are in the table."""

    table: VocabParallelEmbedding

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        return self.table(token_ids, batch.ranks)


@dataclass(frozen=True, slots=True)
class PositionedEmbedding:
    """Learned positions, added to what tokens are embedded as."""

    tokens: Embedding
    table: Tensor  # [n_positions, hidden]

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        return self.tokens(token_ids, batch) + F.embedding(batch.positions, self.table)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over paged K/V, in the form of its family and layer."""

    qkv: ColumnParallelLinear
    output: RowParallelLinear
    n_heads: int  # of this rank
    n_kv_heads: int  # of this rank
    head_dim: int
    ops: Ops
    form: AttentionForm
    rotary: int | None  # which of the batch's angles turn queries and keys; None: none do
    head_norms: HeadNorms | None = None  # of queries and keys, before they are turned

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        config: ModelConfig,
        ops: Ops,
        *,
        form: AttentionForm,
        qkv_bias: bool = False,
        output_bias: bool = False,
        output_name: str = "o_proj",
        rotary: int | None = 0,
        head_norms: HeadNorms | None = None,
    ) -> Self:
        """Reads `q_proj`, `k_proj`, `v_proj` and the output projection under `prefix`."""
        if head_norms is not None and rotary is None:
            raise ValueError("heads are normalised where they turn, and these do not turn")
        heads = HeadShare.of(config, source.tp_rank, source.tp_size)
        q, k_or_v = heads.q_elements(config), heads.kv_elements(config)
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        qkv = ColumnParallelLinear.read(
            source,
            [f"{prefix}.{name}_proj" for name in "qkv"],
            n_in=config.hidden_size,
            n_out=(n_q, n_kv, n_kv),
            shares=(q, k_or_v, k_or_v),
            has_bias=qkv_bias,
        )
        output = RowParallelLinear.read(
            source,
            f"{prefix}.{output_name}",
            n_in=n_q,
            n_out=config.hidden_size,
            share=q,
            has_bias=output_bias,
        )
        return cls(
            qkv,
            output,
            len(heads.q),
            len(heads.kv),
            config.head_dim,
            ops,
            form,
            rotary,
            head_norms,
        )

    def __call__(
        self, x: Tensor, batch: StageBatch, kv: LayerKV, residual: Tensor | None = None
    ) -> Tensor:
        keys, values = kv
        q = self._take_in(self.qkv(x), keys, values, batch)
        attended = self.ops.attention(q, keys, values, batch.attention, self.form)
        return self.output(attended.flatten(1), batch.ranks, residual)  # [n_tokens, hidden]

    def _take_in(self, qkv: Tensor, keys: Tensor, values: Tensor, batch: StageBatch) -> Tensor:
        """Stores keys and values; returns queries [n_tokens, n_heads, head_dim]."""
        n_heads = self.n_heads
        if self.rotary is None:
            heads = qkv.view(qkv.shape[0], -1, self.head_dim)  # q, k and v heads
            k, v = heads[:, n_heads : -self.n_kv_heads], heads[:, -self.n_kv_heads :]
            self.ops.write_kv(k, v, keys, values, batch.slots)
            return heads[:, :n_heads]
        cos, sin = batch.angles[self.rotary]
        return self.ops.rotary_write_kv(
            qkv, cos, sin, keys, values, batch.slots, n_heads, self.head_norms
        )


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))`."""

    inner: Callable[[Tensor], Tensor]  # gated, [n_tokens, hidden] to [n_tokens, size]
    down: RowParallelLinear

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        config: ModelConfig,
        ops: Ops,
        *,
        size: int,
        gate: Gate = "silu",
        has_bias: bool = False,
    ) -> Self:
        """Reads `gate_proj`, `up_proj` and `down_proj` under `prefix`, `size` wide inside."""
        inner = read_gated(
            source,
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
            n_in=config.hidden_size,
            size=size,
            gate=gate,
            ops=ops,
            has_bias=has_bias,
        )
        down = RowParallelLinear.read(
            source,
            f"{prefix}.down_proj",
            n_in=size,
            n_out=config.hidden_size,
            has_bias=has_bias,
        )
        return cls(inner, down)

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        return self.down(self.inner(x), ranks, residual)  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """`down(activation(up(x)))`."""

    up: ColumnParallelLinear
    down: RowParallelLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        return self.down(self.activation(self.up(x)), ranks, residual)  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation with a learned scale and shift."""

    weight: Tensor  # [hidden]
    bias: Tensor  # [hidden]
    eps: float
    ops: Ops

    @classmethod
    def read(cls, source: TensorSource, name: str, *, size: int, eps: float, ops: Ops) -> Self:
        """Reads `name`."""
        weight, bias = source.tensor(f"{name}.weight", size), source.tensor(f"{name}.bias", size)
        return cls(weight, bias, eps, ops)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """Attention and MLP, each on the normalised residual stream and added to it."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        hidden = self.attention(self.attention_norm(hidden), batch, kv, hidden)
        return self.mlp(self.mlp_norm(hidden), batch.ranks, hidden)  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class NormedHead:
    """A norm, then the product with the row of every token."""

    norm: Norm
    projection: VocabParallelHead

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        return self.projection(self.norm(hidden), ranks)  # [n, vocab_size]
