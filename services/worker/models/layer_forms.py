"""Layers, embeddings and heads of other forms than Llama's: norms after, multipliers, caps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import LayerKV
from services.worker.models.decoder_layers import MLP, Attention, Embedding, Head, Norm
from services.worker.models.stage import StageBatch
from services.worker.models.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """Embeds tokens and multiplies the result by a factor."""

    tokens: Embedding
    factor: float

    def __call__(self, token_ids: Tensor, batch: StageBatch) -> Tensor:
        return self.tokens(token_ids, batch) * self.factor


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


@dataclass(frozen=True, slots=True)
class ScaledLayer:
    """Adds attention and an MLP to the residual stream, each behind a norm and times a factor."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP
    factor: float

    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), batch, kv)
        hidden = torch.add(hidden, attended, alpha=self.factor)
        changed = self.mlp(self.mlp_norm(hidden), batch.ranks)
        return torch.add(hidden, changed, alpha=self.factor)  # [n_tokens, hidden]


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


@dataclass(frozen=True, slots=True)
class ScaledHead:
    """Computes logits and multiplies them by a factor."""

    head: Head
    factor: float

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        return self.head(hidden, ranks) * self.factor


@dataclass(frozen=True, slots=True)
class CappedHead:
    """Computes logits that stay within a cap, in float32."""

    head: Head
    cap: float

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        return self.cap * torch.tanh(self.head(hidden, ranks).float() / self.cap)
