"""The layers that several decoder families share: attention, MLPs, norms and whole layers.

Each layer is a frozen dataclass of weights and settings. Its method `describe` adds the layer's
steps to a program. For example, a gated MLP is two steps:

    inner = to.gated(self.gate_up, x)
    return self.down.describe(to, inner, residual)

`decoder.py` has the stages that are made of these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from kernels import AttentionForm, HeadNorms
from kernels.program import Program
from kernels.steps import Buffer, Heads
from kernels.weights.gated_in_two import GatedMatrix
from kernels.weights.linear import Gate
from services.worker.models.config import ModelConfig
from services.worker.models.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    read_gated,
)
from services.worker.models.tensor_parallel import HeadShare
from services.worker.models.weights import TensorSource

Activation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
"""The supported values of Hugging Face's configuration key `activation_function`."""


class Norm(Protocol):
    """Normalises rows."""

    def describe(self, to: Program, x: Buffer) -> Buffer:
        """Adds the step of this norm to a program, and returns the normalised rows of `x`, which
        keep the width of `x`."""


class Embedding(Protocol):
    """Turns the tokens of a batch into hidden states."""

    def describe(self, to: Program) -> Buffer:
        """Adds the steps of this embedding to a program, and returns the hidden states of the
        batch's tokens. All ranks get equal results."""


class Layer(Protocol):
    """One layer of the model: computes hidden states from hidden states."""

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        """Adds the layer's steps to a program, and returns the hidden states after the layer. The
        steps may overwrite `hidden`.

        `layer` is the index of the layer on its stage, which is also the index of the storage of
        its keys and values.
        """


class Head(Protocol):
    """Turns hidden states after the last layer into logits."""

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        """Adds the steps of this head to a program, and returns the logits [n, vocab_size]. All
        ranks get equal results. The steps may overwrite `hidden`."""


class Mixer(Protocol):
    """A part of a layer in which a token gets information from earlier tokens of its sequence, such
    as attention."""

    def describe(
        self, to: Program, x: Buffer, layer: int, residual: Buffer | None = None
    ) -> Buffer:
        """Adds the steps of this part to a program, and returns their result [n_tokens, hidden].
        All ranks get equal results.

        If `residual` [n_tokens, hidden] is given, it is added to the result, and may be
        overwritten. `layer` is the index of the layer on its stage.
        """


class MLP(Protocol):
    """Transforms the hidden states of every token independently of other tokens."""

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps of this MLP to a program, and returns their result [n_tokens, hidden]. All
        ranks get equal results.

        If `residual` [n_tokens, hidden] is given, it is added to the result, and may be
        overwritten.
        """


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """Looks up the embedding of a token: a row of a table."""

    table: VocabParallelEmbedding

    def describe(self, to: Program) -> Buffer:
        return self.table.describe(to)


@dataclass(frozen=True, slots=True)
class PositionedEmbedding:
    """Adds learned position embeddings to the embeddings of tokens."""

    tokens: Embedding
    table: Tensor  # [n_positions, hidden]

    def describe(self, to: Program) -> Buffer:
        return to.add_positions(self.table, self.tokens.describe(to))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """This rank's share of grouped-query attention over paged K/V."""

    qkv: ColumnParallelLinear  # projects to queries, keys and values, in this order
    output: RowParallelLinear
    n_heads: int
    n_kv_heads: int
    head_dim: int
    form: AttentionForm
    rotary: int | None  # index of the rotary embedding; None: no rotation
    head_norms: HeadNorms | None = None  # of queries and keys, before rotation
    sinks: Tensor | None = None  # [n_heads] float32, additional scores in the softmax

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        config: ModelConfig,
        *,
        form: AttentionForm,
        qkv_bias: bool = False,
        output_bias: bool = False,
        output_name: str = "o_proj",
        projected: str = "qkv",
        fused_name: str | None = None,
        order: Sequence[int] | None = None,
        rotary: int | None = 0,
        head_norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Self:
        """Reads `q_proj`, `k_proj`, `v_proj` and the output projection under `prefix`.

        `projected` names the projections that the layer has by their letters: "qkv", or fewer.
        `fused_name` is the name of one matrix that holds queries, keys and values, one after the
        other. `order` gives, for each element of a query or key head, the index at which the
        element is stored (see `rope.head_order`). Raises ValueError for `head_norms` without rotary
        embedding.
        """
        if head_norms is not None and rotary is None:
            raise ValueError("heads are normalised where they turn, and these do not turn")
        heads = HeadShare.of(config, source.tp_rank, source.tp_size)
        q, k_or_v = heads.q_elements(config), heads.kv_elements(config)
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        names = [f"{prefix}.{name}_proj" for name in projected]
        n_out, firsts = (n_q, n_kv, n_kv), (0, 0, 0)
        if fused_name is not None:
            names = [f"{prefix}.{fused_name}"] * 3
            n_out, firsts = (n_q + 2 * n_kv,) * 3, (0, n_q, n_q + n_kv)
        qkv = ColumnParallelLinear.read(
            source,
            names,
            n_in=config.hidden_size,
            n_out=n_out[: len(names)],
            shares=[
                range(first + share.start, first + share.stop)
                for first, share in zip(firsts, (q, k_or_v, k_or_v), strict=True)
            ][: len(names)],
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
            form=form,
            rotary=rotary,
            head_norms=head_norms,
            sinks=sinks,
        )

    @classmethod
    def of(cls, plain: Attention, **parts: Any) -> Self:
        """Returns an object of this class with the fields of `plain`. `parts` are the fields that
        only this class has."""
        return cls(**{each.name: getattr(plain, each.name) for each in fields(plain)}, **parts)

    @property
    def heads(self) -> Heads:
        """The layout of this rank's query, key and value heads in a row of the output of `qkv`."""
        return Heads(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim)

    def describe(
        self, to: Program, x: Buffer, layer: int, residual: Buffer | None = None
    ) -> Buffer:
        """Adds the steps of attention to a program, as `Mixer.describe` specifies."""
        qkv = self.describe_stored(to, self.qkv.describe(to, x), layer)
        attended = to.attend(qkv, self.heads, self.form, self.sinks, layer=layer)
        return self.output.describe(to, attended, residual)

    def describe_stored(self, to: Program, qkv: Buffer, layer: int) -> Buffer:
        """Adds to a program the step that stores keys and values. Before that, the step normalises
        queries and keys if the layer has `head_norms`, and rotates them if it has a rotary
        embedding. Returns the rows that attention reads, [n_tokens, any width]; each row begins
        with the queries.

        A subclass may add other steps. For example, a layer of `NormedAttention` that attends to
        the keys and values of an earlier layer stores nothing.
        """
        if self.rotary is None:
            to.write_kv(qkv, self.heads, layer=layer)
        else:
            to.rotary_write_kv(qkv, self.heads, self.head_norms, rotary=self.rotary, layer=layer)
        return qkv


def _rows_in_order(heads: HeadShare, order: Sequence[int]) -> Tensor:
    """Returns, for each output of this rank's queries, keys and values, the index of its row among
    the rows that this rank reads.

    The elements of each query and key head are permuted by `order`. Values stay in their stored
    order.
    """
    head_dim, n_turned = len(order), len(heads.q) + len(heads.kv)
    starts = torch.arange(n_turned)[:, None] * head_dim
    turned = (starts + torch.tensor(order)).flatten()
    values = torch.arange(n_turned * head_dim, (n_turned + len(heads.kv)) * head_dim)
    return torch.cat((turned, values))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """This rank's share of `down(activation(gate(x)) * up(x))`."""

    gate_up: GatedMatrix
    down: RowParallelLinear

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        config: ModelConfig,
        *,
        size: int,
        gate: Gate = "silu",
        has_bias: bool = False,
        fused_name: str | None = None,
    ) -> Self:
        """Reads `gate_proj`, `up_proj` and `down_proj` under `prefix`. The inner size of the MLP is
        `size`.

        `fused_name` is the name of one matrix that holds gate and up, one after the other.
        """
        names = ["gate_proj", "up_proj"] if fused_name is None else [fused_name]
        gate_up = read_gated(
            source,
            [f"{prefix}.{name}" for name in names],
            n_in=config.hidden_size,
            size=size,
            gate=gate,
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

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps of the MLP to a program, as `MLP.describe` specifies."""
        return self.down.describe(to, to.gated(self.gate_up, x), residual)

    def describe_share(self, to: Program, x: Buffer) -> Buffer:
        """Adds the steps of this rank's share to a program. Returns the summand that this rank
        contributes to the sum over the ranks, [n_tokens, hidden], without the bias."""
        return to.multiply(self.down.weight, to.gated(self.gate_up, x))


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """This rank's share of `down(activation(up(x)))`."""

    up: ColumnParallelLinear
    down: RowParallelLinear
    activation: Activation

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps of the MLP to a program, as `MLP.describe` specifies."""
        inner = self.up.describe(to, x)
        is_plain = self.activation in ("relu", "gelu")
        to.activate(self.activation if is_plain else "gelu_tanh", inner)
        return self.down.describe(to, inner, residual)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """A norm that returns its input, for models without a norm at this place."""

    def describe(self, to: Program, x: Buffer) -> Buffer:
        return x


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation with a learned scale and shift."""

    weight: Tensor  # [hidden]
    bias: Tensor  # [hidden]
    eps: float

    @classmethod
    def read(cls, source: TensorSource, name: str, *, size: int, eps: float) -> Self:
        """Reads `{name}.weight` and `{name}.bias`, [size]."""
        weight, bias = source.tensor(f"{name}.weight", size), source.tensor(f"{name}.bias", size)
        return cls(weight, bias, eps)

    def describe(self, to: Program, x: Buffer) -> Buffer:
        return to.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """A layer that adds attention and an MLP to the residual stream. The input of each of the two
    is normalised first."""

    attention_norm: Norm
    attention: Mixer
    mlp_norm: Norm
    mlp: MLP

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        normed = self.attention_norm.describe(to, hidden)
        hidden = self.attention.describe(to, normed, layer, hidden)
        return self.mlp.describe(to, self.mlp_norm.describe(to, hidden), hidden)


@dataclass(frozen=True, slots=True)
class NormedHead:
    """A head that normalises hidden states and multiplies them by the head matrix to get logits."""

    norm: Norm
    projection: VocabParallelHead

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        return self.projection.describe(to, self.norm.describe(to, hidden))
