"""The layers that several decoder families share: attention, MLPs and what holds them together.

What families vary are plain fields, set once when weights are read. Attention and the gated MLP
derive from the descriptions of `kernels.layer`, so that operations can read what they consist of.
`decoder.py` has the stages that are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionForm, HeadNorms, Ops
from kernels.layer import AttentionWeights, GatedMLPWeights
from kernels.ops import LayerKV
from kernels.packed_linear import Gate
from services.worker.models.config import ModelConfig
from services.worker.models.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    read_gated,
)
from services.worker.models.stage import StageBatch
from services.worker.models.tensor_parallel import HeadShare, TensorParallel
from services.worker.models.weights import TensorSource

Activation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]


def activation_of(name: Activation, ops: Ops) -> Callable[[Tensor], Tensor]:
    """Returns what Hugging Face's `activation_function` means by `name`."""
    if name == "relu":
        return F.relu
    return F.gelu if name == "gelu" else ops.gelu_tanh


Norm = Callable[[Tensor], Tensor]  # [..., size] to the same shape


class Embedding(Protocol):
    """Turns tokens into hidden states."""

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        """Returns [n_tokens, hidden] for `token_ids` [n_tokens], the same on every rank."""


class Layer(Protocol):
    """Runs one layer over a batch."""

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        """Returns [n_tokens, hidden] for `hidden` of that shape, which is used up.

        The keys and values of the batch are stored in `kv`.
        """


class Head(Protocol):
    """Turns hidden states after the last layer into logits."""

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        """Returns [n, vocab_size] for `hidden` [n, hidden], the same on every rank."""


class MLP(Protocol):
    """Changes every token by itself."""

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        """Returns [n_tokens, hidden] for `x` of that shape, the same on every rank.

        A `residual` of the same shape is added to the result, and used up.
        """


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """Embeds tokens as their rows of a table."""

    table: VocabParallelEmbedding

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        return self.table(token_ids, batch.ranks)


@dataclass(frozen=True, slots=True)
class PositionedEmbedding:
    """Adds learned positions to embedded tokens."""

    tokens: Embedding
    table: Tensor  # [n_positions, hidden]

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        return self.tokens(token_ids, batch) + F.embedding(batch.positions, self.table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(AttentionWeights):
    """This rank's share of grouped-query attention, computed operation by operation."""

    qkv: ColumnParallelLinear
    output: RowParallelLinear
    ops: Ops
    rotary: int | None  # which of the batch's angles turn queries and keys; None: none do

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
        fused_name: str | None = None,
        order: Sequence[int] | None = None,
        rotary: int | None = 0,
        head_norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Self:
        """Reads `q_proj`, `k_proj`, `v_proj` and the output projection under `prefix`.

        `fused_name` is that of one matrix which has the first three, one after the other. `order`
        is the stored place of each element of a head of queries or keys, as `rope.head_order` has
        it. Raises ValueError for norms of heads that do not turn.
        """
        if head_norms is not None and rotary is None:
            raise ValueError("heads are normalised where they turn, and these do not turn")
        heads = HeadShare.of(config, source.tp_rank, source.tp_size)
        q, k_or_v = heads.q_elements(config), heads.kv_elements(config)
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        n_out, firsts = (n_q, n_kv, n_kv), (0, 0, 0)
        if fused_name is not None:
            names = [f"{prefix}.{fused_name}"] * 3
            n_out, firsts = (n_q + 2 * n_kv,) * 3, (0, n_q, n_q + n_kv)
        qkv = ColumnParallelLinear.read(
            source,
            names,
            n_in=config.hidden_size,
            n_out=n_out,
            shares=[
                range(first + share.start, first + share.stop)
                for first, share in zip(firsts, (q, k_or_v, k_or_v), strict=True)
            ],
            has_bias=qkv_bias,
            order=None if order is None else _rows_in_order(heads, order),
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
            qkv=qkv,
            output=output,
            n_heads=len(heads.q),
            n_kv_heads=len(heads.kv),
            head_dim=config.head_dim,
            ops=ops,
            form=form,
            rotary=rotary,
            head_norms=head_norms,
            sinks=sinks,
        )

    def __call__(
        self, x: Tensor, batch: StageBatch, kv: LayerKV, residual: Tensor | None = None
    ) -> Tensor:
        """Returns [n_tokens, hidden], with `residual` of the same shape added and used up."""
        keys, values = kv
        q = self._take_in(self.qkv(x), keys, values, batch)
        attended = self.ops.attention(q, keys, values, batch.attention, self.form, self.sinks)
        return self.output(attended.flatten(1), batch.ranks, residual)  # [n_tokens, hidden]

    def _take_in(self, qkv: Tensor, keys: Tensor, values: Tensor, batch: StageBatch) -> Tensor:
        """Stores keys and values and returns queries [n_tokens, n_heads, head_dim], both turned
        where there are angles; `qkv` is used up."""
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


def _rows_in_order(heads: HeadShare, order: Sequence[int]) -> Tensor:
    """Returns the stored rows of a rank's queries, keys and values, heads of the first two in
    `order`."""
    head_dim, n_turned = len(order), len(heads.q) + len(heads.kv)
    starts = torch.arange(n_turned)[:, None] * head_dim
    turned = (starts + torch.tensor(order)).flatten()
    values = torch.arange(n_turned * head_dim, (n_turned + len(heads.kv)) * head_dim)
    return torch.cat((turned, values))


@dataclass(frozen=True, slots=True)
class GatedMLP(GatedMLPWeights):
    """This rank's share of `down(activation(gate(x)) * up(x))`."""

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
        fused_name: str | None = None,
    ) -> Self:
        """Reads `gate_proj`, `up_proj` and `down_proj` under `prefix`, `size` wide inside.

        `fused_name` is that of one matrix which has the first two, one after the other.
        """
        names = ["gate_proj", "up_proj"] if fused_name is None else [fused_name]
        gate_up = read_gated(
            source,
            [f"{prefix}.{name}" for name in names],
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
        return cls(gate_up, down)

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        return self.down(self.gate_up(x), ranks, residual)  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """This rank's share of `down(activation(up(x)))`."""

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
        """Reads `{name}.weight` and `{name}.bias`, [size]."""
        weight, bias = source.tensor(f"{name}.weight", size), source.tensor(f"{name}.bias", size)
        return cls(weight, bias, eps, ops)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """Adds attention and an MLP to the residual stream, each computed on its normalised form."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        hidden = self.attention(self.attention_norm(hidden), batch, kv, hidden)
        return self.mlp(self.mlp_norm(hidden), batch.ranks, hidden)  # [n_tokens, hidden]


@dataclass(frozen=True, slots=True)
class NormedHead:
    """Normalises hidden states, then multiplies them with the row of every token."""

    norm: Norm
    projection: VocabParallelHead

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        return self.projection(self.norm(hidden), ranks)  # [n, vocab_size]
