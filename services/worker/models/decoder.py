"""The decoder that families fill in: tokens in, layers one after the other, logits out.

`DecoderStage` does what all families do alike. A family says what its layers are (`read_layer`),
and overrides a step only where it differs. The layers here are those that several families share;
each has what families vary as plain fields, set once when weights are read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionForm, AttentionMetadata, Ops
from kernels.packed_linear import Gate
from services.worker.models.config import ModelConfig, RotaryConfig
from services.worker.models.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    read_gated,
)
from services.worker.models.stage import LayerKV, StageModel, StagePlace
from services.worker.models.tensor_parallel import SINGLE, HeadShare, TensorParallel
from services.worker.models.weights import TensorSource

# By the names of Hugging Face's `activation_function`.
Activation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}

Angles = tuple[Tensor, Tensor]  # cosines and signed sines, [n_tokens, 1, head_dim]
Norm = Callable[[Tensor], Tensor]  # [..., size] to the same shape


@dataclass(frozen=True, slots=True)
class DecoderBatch:
    """What layers must know of the batch beside its hidden states."""

    angles: Sequence[Angles]  # of each kind of rotary embedding that the model has
    slots: Tensor  # [n_tokens]
    attention: AttentionMetadata
    ranks: TensorParallel  # that share the layers


class Layer(Protocol):
    """One layer: hidden states [n_tokens, hidden] to the same, its K and V stored on the way."""

    def __call__(self, hidden: Tensor, batch: DecoderBatch, kv: LayerKV) -> Tensor: ...


class MLP(Protocol):
    """What a layer does to every token by itself, [n_tokens, hidden] to the same.

    A `residual` of the same shape is added to the result, and used up.
    """

    def __call__(
        self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None
    ) -> Tensor: ...


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
    q_norm: Norm | None  # over each head, before it is turned
    k_norm: Norm | None

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
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Self:
        """Reads `q_proj`, `k_proj`, `v_proj` and the output projection under `prefix`."""
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
            q_norm,
            k_norm,
        )

    def __call__(
        self, x: Tensor, batch: DecoderBatch, kv: LayerKV, residual: Tensor | None = None
    ) -> Tensor:
        keys, values = kv
        q = self._take_in(self.qkv(x), keys, values, batch)
        attended = self.ops.attention(q, keys, values, batch.attention, self.form)
        return self.output(attended.flatten(1), batch.ranks, residual)  # [n_tokens, hidden]

    def _take_in(self, qkv: Tensor, keys: Tensor, values: Tensor, batch: DecoderBatch) -> Tensor:
        """Stores keys and values; returns queries [n_tokens, n_heads, head_dim]."""
        n_heads = self.n_heads
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)  # q, k and v heads
        if self.q_norm is not None and self.k_norm is not None:
            k, v = heads[:, n_heads : -self.n_kv_heads], heads[:, -self.n_kv_heads :]
            heads = torch.cat((self.q_norm(heads[:, :n_heads]), self.k_norm(k), v), 1)
        if self.rotary is None:
            k, v = heads[:, n_heads : -self.n_kv_heads], heads[:, -self.n_kv_heads :]
            self.ops.write_kv(k, v, keys, values, batch.slots)
            return heads[:, :n_heads]
        cos, sin = batch.angles[self.rotary]
        return self.ops.rotary_write_kv(
            heads.flatten(1), cos, sin, keys, values, batch.slots, n_heads
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

    def __call__(self, hidden: Tensor, batch: DecoderBatch, kv: LayerKV) -> Tensor:
        hidden = self.attention(self.attention_norm(hidden), batch, kv, hidden)
        return self.mlp(self.mlp_norm(hidden), batch.ranks, hidden)  # [n_tokens, hidden]


class DecoderStage(StageModel):
    """One stage of a decoder; families override what they do otherwise."""

    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    layers_name: ClassVar[str] = "model.layers"
    norm_name: ClassVar[str] = "model.norm"
    head_name: ClassVar[str] = "lm_head.weight"

    def __init__(
        self,
        config: ModelConfig,
        place: StagePlace,
        *,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, place, dtype=dtype, device=device)
        self._embedding: VocabParallelEmbedding | None = None
        if place.is_first:
            self._embedding = self._read_embedding_table(source)
            self.read_embedding(source)
        self._decoder_layers = [
            self.read_layer(source, f"{self.layers_name}.{i}", i) for i in place.layers
        ]
        self._head: tuple[Norm, VocabParallelHead] | None = None
        if place.is_last:
            norm = self.read_final_norm(source)
            self._head = norm, self._read_head(source)

    def _read_embedding_table(self, source: TensorSource) -> VocabParallelEmbedding:
        size, hidden_size = self.config.vocab_size, self.config.hidden_size
        return VocabParallelEmbedding.read(
            source,
            self.embedding_name,
            vocab_size=size,
            hidden_size=hidden_size,
            is_tied=self.is_last and self.config.tie_word_embeddings,
        )

    def _read_head(self, source: TensorSource) -> VocabParallelHead:
        is_tied = self.config.tie_word_embeddings
        if is_tied and self._embedding is not None:
            return VocabParallelHead.tied(self._embedding)
        name = self.embedding_name if is_tied else self.head_name
        size, hidden_size = self.config.vocab_size, self.config.hidden_size
        return VocabParallelHead.read(source, name, vocab_size=size, hidden_size=hidden_size)

    @abstractmethod
    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        """Reads the layer that is number `index` of the model, under `prefix`."""

    @abstractmethod
    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        """Reads a norm of the family's kind."""

    def read_final_norm(self, source: TensorSource) -> Norm:
        """Reads what comes between the last layer and the head."""
        return self.read_norm(source, self.norm_name, self.config.hidden_size)

    def read_embedding(self, source: TensorSource) -> None:
        """Reads what the first stage has beside the tokens' table; here nothing."""

    def angles(self, positions: Tensor) -> Sequence[Angles]:
        """How queries and keys turn at `positions` [n_tokens]; here not at all."""
        return ()

    def enter(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """What the first stage does to embedded tokens before its layers; here nothing."""
        return hidden

    def embed(self, token_ids: Tensor, ranks: TensorParallel = SINGLE) -> Tensor:
        if self._embedding is None:
            raise RuntimeError("only the first stage embeds tokens")
        return self._embedding(token_ids, ranks)  # [n_tokens, hidden]

    def forward(
        self,
        hidden: Tensor,
        *,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        kv: Sequence[LayerKV],
        ranks: TensorParallel = SINGLE,
    ) -> Tensor:
        batch = DecoderBatch(self.angles(positions), slots, attention, ranks)
        if self.is_first:
            hidden = self.enter(hidden, positions)
        for layer, layer_kv in zip(self._decoder_layers, kv, strict=True):
            hidden = layer(hidden, batch, layer_kv)
        return hidden  # [n_tokens, hidden]

    def logits(self, hidden: Tensor, ranks: TensorParallel = SINGLE) -> Tensor:
        if self._head is None:
            raise RuntimeError("only the last stage has logits")
        norm, head = self._head
        return head(norm(hidden), ranks)  # [n, vocab_size]


class RotaryStage(DecoderStage):
    """One stage of what descends from Llama; a family says how it reads its attention and MLP."""

    config: RotaryConfig

    def __init__(
        self,
        config: RotaryConfig,
        place: StagePlace,
        *,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rotary = RotaryEmbedding(config, dtype=dtype, device=device)
        super().__init__(config, place, source=source, dtype=dtype, device=device)

    def angles(self, positions: Tensor) -> Sequence[Angles]:
        return (self._rotary(positions),)

    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        return RMSNorm(source.tensor(f"{name}.weight", size), self.config.rms_norm_eps, self.ops)

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        hidden_size = self.config.hidden_size
        return PreNormLayer(
            self.read_norm(source, f"{prefix}.input_layernorm", hidden_size),
            self.read_attention(source, f"{prefix}.self_attn", index),
            self.read_norm(source, f"{prefix}.post_attention_layernorm", hidden_size),
            self.read_mlp(source, f"{prefix}.mlp", index),
        )

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        """Reads the attention of layer `index`; here without biases and norms."""
        form = AttentionForm(window=self.config.layer_windows[index])
        return Attention.read(source, prefix, self.config, self.ops, form=form)

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        """Reads the MLP of layer `index`; here without biases."""
        size = self.config.intermediate_size
        return GatedMLP.read(source, prefix, self.config, self.ops, size=size)

    def read_head_norms(self, source: TensorSource, prefix: str) -> tuple[Norm, Norm]:
        """Reads the norms over single heads of queries and of keys, for families that have them."""
        head_dim = self.config.head_dim
        return (
            self.read_norm(source, f"{prefix}.q_norm", head_dim),
            self.read_norm(source, f"{prefix}.k_norm", head_dim),
        )
