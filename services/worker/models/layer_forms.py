"""Layers, embeddings and heads of other forms than Llama's: norms after, multipliers, caps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels import Ops
from kernels.ops import LayerKV
from kernels.steps import Buffer
from services.worker.models.decoder_layers import MLP, Attention, Embedding, Head, Norm
from services.worker.models.recording import Recorder
from services.worker.models.stage import StageBatch
from services.worker.models.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """Embeds tokens and multiplies the result by a factor."""

    tokens: Embedding
    factor: float

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        return self.tokens(token_ids, batch) * self.factor

    def record(self, to: Recorder) -> Buffer | None:
        tokens = to.embedding(self.tokens)
        return None if tokens is None else to.scale(tokens, self.factor)


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """Adds attention and an MLP to the residual stream, each between two norms."""

    attention_norm: Norm
    attention: Attention
    attended_norm: Norm
    mlp_norm: Norm
    mlp: MLP
    mlp_out_norm: Norm

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), batch, kv)
        hidden = hidden + self.attended_norm(attended)
        # [n_tokens, hidden]
        return hidden + self.mlp_out_norm(self.mlp(self.mlp_norm(hidden), batch.ranks))

    def record(self, to: Recorder, hidden: Buffer, layer: int) -> Buffer:
        attended = to.attention(self.attention, to.norm(self.attention_norm, hidden), layer)
        hidden = to.add(hidden, to.norm(self.attended_norm, attended))
        changed = to.mlp(self.mlp, to.norm(self.mlp_norm, hidden))
        return to.add(hidden, to.norm(self.mlp_out_norm, changed))


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """Adds attention and an MLP to the residual stream, each normalised after it is computed."""

    attention: Attention
    attended_norm: Norm
    mlp: MLP
    mlp_out_norm: Norm

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        hidden = hidden + self.attended_norm(self.attention(hidden, batch, kv))
        return hidden + self.mlp_out_norm(self.mlp(hidden, batch.ranks))  # [n_tokens, hidden]

    def record(self, to: Recorder, hidden: Buffer, layer: int) -> Buffer:
        attended = to.attention(self.attention, hidden, layer)
        hidden = to.add(hidden, to.norm(self.attended_norm, attended))
        return to.add(hidden, to.norm(self.mlp_out_norm, to.mlp(self.mlp, hidden)))


@dataclass(frozen=True, slots=True)
class ScaledLayer:
    """Adds attention and an MLP to the residual stream, each behind a norm and times a factor."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP
    factor: float
    ops: Ops

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), batch, kv)
        hidden = self.ops.add_scaled(hidden, attended, self.factor)
        changed = self.mlp(self.mlp_norm(hidden), batch.ranks)
        return self.ops.add_scaled(hidden, changed, self.factor)  # [n_tokens, hidden]

    def record(self, to: Recorder, hidden: Buffer, layer: int) -> Buffer:
        attended = to.attention(self.attention, to.norm(self.attention_norm, hidden), layer)
        hidden = to.add(hidden, attended, self.factor)
        return to.add(hidden, to.mlp(self.mlp, to.norm(self.mlp_norm, hidden)), self.factor)


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """Adds attention and an MLP to the residual stream, both computed on one normalised form."""

    norm: Norm
    attention: Attention
    mlp: MLP

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        normed = self.norm(hidden)
        hidden = self.attention(normed, batch, kv, hidden)
        return self.mlp(normed, batch.ranks, hidden)  # [n_tokens, hidden]

    def record(self, to: Recorder, hidden: Buffer, layer: int) -> Buffer:
        normed = to.norm(self.norm, hidden)
        return to.mlp(self.mlp, normed, to.attention(self.attention, normed, layer, hidden))


@dataclass(frozen=True, slots=True)
class ScaledHead:
    """Computes logits and multiplies them by a factor."""

    head: Head
    factor: float

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        return self.head(hidden, ranks) * self.factor

    def record(self, to: Recorder, hidden: Buffer) -> Buffer | None:
        logits = to.head(self.head, hidden)
        return None if logits is None else to.scale(logits, self.factor)


@dataclass(frozen=True, slots=True)
class CappedHead:
    """Computes logits that stay within a cap, in float32."""

    head: Head
    cap: float
    ops: Ops

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        return self.ops.soft_cap(self.head(hidden, ranks), self.cap)

    def record(self, to: Recorder, hidden: Buffer) -> Buffer | None:
        logits = to.head(self.head, hidden)
        return None if logits is None else to.soft_cap(logits, self.cap)
