"""The layers that several decoder families share: attention, MLPs and what holds them together.

What families vary are plain fields, set once when weights are read. A piece computes when it is
called, and `record` says the same as steps of a program (`recording.py`). `decoder.py` has the
stages that are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionForm, HeadNorms, Ops
from kernels.linear_weight import Gate, GatedWeight
from kernels.ops import LayerKV
from kernels.steps import Buffer, Heads
from services.worker.models.config import ModelConfig
from services.worker.models.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    read_gated,
)
from services.worker.models.recording import Recorder
from services.worker.models.stage import StageBatch
from services.worker.models.tensor_parallel import HeadShare, TensorParallel
from services.worker.models.weights import TensorSource

Activation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
"""What Hugging Face's `activation_function` may be."""


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


class Mixer(Protocol):
    """Lets tokens of a sequence take in those before them, as attention does."""

    def __call__(
        self, x: Tensor, batch: StageBatch, kv: LayerKV, residual: Tensor | None = None
    ) -> Tensor:
        """Returns [n_tokens, hidden], with `residual` of the same shape added and used up."""


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

    def record(self, to: Recorder) -> Buffer | None:
        return self.table.record(to)


@dataclass(frozen=True, slots=True)
class PositionedEmbedding:
    """Adds learned positions to embedded tokens."""

    tokens: Embedding
    table: Tensor  # [n_positions, hidden]

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        return self.tokens(token_ids, batch) + F.embedding(batch.positions, self.table)

    def record(self, to: Recorder) -> Buffer | None:
        tokens = to.embedding(self.tokens)
        return None if tokens is None else to.add_positions(self.table, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """This rank's share of grouped-query attention over paged K/V."""

    qkv: ColumnParallelLinear  # to a token's queries, keys and values, one after the other
    output: RowParallelLinear
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ops: Ops
    form: AttentionForm
    rotary: int | None  # which of the batch's angles turn queries and keys; None: none do
    head_norms: HeadNorms | None = None  # of queries and keys, before they turn
    sinks: Tensor | None = None  # [n_heads] float32, scores beside those of keys

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

    def record(self, to: Recorder, x: Buffer, layer: int, residual: Buffer | None = None) -> Buffer:
        qkv = self.qkv.record(to, x)
        heads = Heads(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim)
        self._record_take_in(to, qkv, heads, layer)
        attended = to.attend(qkv, heads, self.form, self.sinks, layer=layer)
        return self.output.record(to, attended, residual)

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

    def _record_take_in(self, to: Recorder, qkv: Buffer, heads: Heads, layer: int) -> None:
        """Adds the steps of `_take_in`; one that is replaced without its steps is called."""
        if type(self)._take_in is Attention._take_in:
            self._record_turn(to, qkv, heads, layer)
        else:
            to.call(partial(self._take_in_place, layer, to.group_of(layer)), qkv)

    def _record_turn(self, to: Recorder, qkv: Buffer, heads: Heads, layer: int) -> None:
        """Adds the step that turns queries and keys, if they do, and stores keys and values."""
        if self.rotary is None:
            to.write_kv(qkv, heads, layer=layer)
        else:
            to.rotary_write_kv(qkv, heads, self.head_norms, rotary=self.rotary, layer=layer)

    def _take_in_place(
        self, layer: int, group: int, batch: StageBatch, kv: Sequence[LayerKV], qkv: Tensor
    ) -> None:
        """Does `_take_in` and leaves the queries in their place in `qkv`."""
        q = self._take_in(qkv, *kv[layer], batch.of_groups()[group]).flatten(1)
        if q.data_ptr() != qkv.data_ptr():  # operations may have left them there
            qkv[:, : q.shape[1]].copy_(q)


def _rows_in_order(heads: HeadShare, order: Sequence[int]) -> Tensor:
    """Returns the stored rows of a rank's queries, keys and values, heads of the first two in
    `order`."""
    head_dim, n_turned = len(order), len(heads.q) + len(heads.kv)
    starts = torch.arange(n_turned)[:, None] * head_dim
    turned = (starts + torch.tensor(order)).flatten()
    values = torch.arange(n_turned * head_dim, (n_turned + len(heads.kv)) * head_dim)
    return torch.cat((turned, values))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """This rank's share of `down(activation(gate(x)) * up(x))`."""

    gate_up: GatedWeight
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

    def record(self, to: Recorder, x: Buffer, residual: Buffer | None = None) -> Buffer:
        return self.down.record(to, to.gated(self.gate_up, x), residual)


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """This rank's share of `down(activation(up(x)))`."""

    up: ColumnParallelLinear
    down: RowParallelLinear
    activation: Activation
    ops: Ops

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        return self.down(self._activated(self.up(x)), ranks, residual)  # [n_tokens, hidden]

    def record(self, to: Recorder, x: Buffer, residual: Buffer | None = None) -> Buffer:
        inner = self.up.record(to, x)
        is_plain = self.activation in ("relu", "gelu")
        to.activate(self.activation if is_plain else "gelu_tanh", inner)
        return self.down.record(to, inner, residual)

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "relu":
            return F.relu(x)
        return self.ops.gelu(x) if self.activation == "gelu" else self.ops.gelu_tanh(x)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """Stands where others have a norm, and changes nothing."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def record(self, to: Recorder, x: Buffer) -> Buffer:
        return x


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

    def record(self, to: Recorder, x: Buffer) -> Buffer:
        return to.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """Adds attention and an MLP to the residual stream, each computed on its normalised form."""

    attention_norm: Norm
    attention: Mixer
    mlp_norm: Norm
    mlp: MLP

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        hidden = self.attention(self.attention_norm(hidden), batch, kv, hidden)
        return self.mlp(self.mlp_norm(hidden), batch.ranks, hidden)  # [n_tokens, hidden]

    def record(self, to: Recorder, hidden: Buffer, layer: int) -> Buffer:
        hidden = to.attention(self.attention, to.norm(self.attention_norm, hidden), layer, hidden)
        return to.mlp(self.mlp, to.norm(self.mlp_norm, hidden), hidden)


@dataclass(frozen=True, slots=True)
class NormedHead:
    """Normalises hidden states, then multiplies them with the row of every token."""

    norm: Norm
    projection: VocabParallelHead

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        return self.projection(self.norm(hidden), ranks)  # [n, vocab_size]

    def record(self, to: Recorder, hidden: Buffer) -> Buffer | None:
        return self.projection.record(to, to.norm(self.norm, hidden))
