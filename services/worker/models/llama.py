"""Llama, and what calls itself so: a pre-norm decoder with rotary grouped-query attention.

Touvron et al., 2023; names of tensors as in Hugging Face's `LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionMetadata, Ops
from services.worker.models.config import ModelConfig
from services.worker.models.layers import (
    BatchGeometry,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
)
from services.worker.models.stage import LayerKV, StageModel, StagePlace
from services.worker.models.weights import TensorSource

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each on the normalised residual stream and added to it."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def read(cls, source: TensorSource, prefix: str, config: ModelConfig, ops: Ops) -> Self:
        """Reads one layer under `prefix`."""
        return cls(
            _norm(source, f"{prefix}.input_layernorm", config, ops),
            SelfAttention.read(source, f"{prefix}.self_attn", config, ops),
            _norm(source, f"{prefix}.post_attention_layernorm", config, ops),
            GatedMLP.read(source, f"{prefix}.mlp", config, ops),
        )

    def __call__(self, hidden: Tensor, batch: BatchGeometry, kv: LayerKV) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), batch, kv)
        return hidden + self.mlp(self.mlp_norm(hidden))  # [n_tokens, hidden]


class LlamaStage(StageModel):
    """One stage of a Llama model."""

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
        self._rotary = RotaryEmbedding(config, dtype=dtype, device=device)
        table_shape = (config.vocab_size, config.hidden_size)
        self._embedding: Tensor | None = None  # [vocab_size, hidden]
        if place.is_first:
            self._embedding = source.tensor(_EMBEDDING, *table_shape)
        self._decoder_layers = [
            DecoderLayer.read(source, f"model.layers.{i}", config, place.ops) for i in place.layers
        ]
        self._head: tuple[RMSNorm, Linear] | None = None
        if place.is_last:
            norm = _norm(source, "model.norm", config, place.ops)
            if not config.tie_word_embeddings:
                table = source.tensor("lm_head.weight", *table_shape)
            elif self._embedding is not None:
                table = self._embedding
            else:
                table = source.tensor(_EMBEDDING, *table_shape)
            self._head = norm, Linear(table, None)

    def embed(self, token_ids: Tensor) -> Tensor:
        if self._embedding is None:
            raise RuntimeError("only the first stage embeds tokens")
        return F.embedding(token_ids, self._embedding)  # [n_tokens, hidden]

    def forward(
        self,
        hidden: Tensor,
        *,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        kv: Sequence[LayerKV],
    ) -> Tensor:
        batch = BatchGeometry(*self._rotary(positions), slots, attention)
        for layer, layer_kv in zip(self._decoder_layers, kv, strict=True):
            hidden = layer(hidden, batch, layer_kv)
        return hidden  # [n_tokens, hidden]

    def logits(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            raise RuntimeError("only the last stage has logits")
        norm, projection = self._head
        return projection(norm(hidden)).float()  # [n, vocab_size]


def _norm(source: TensorSource, name: str, config: ModelConfig, ops: Ops) -> RMSNorm:
    return RMSNorm(source.tensor(f"{name}.weight", config.hidden_size), config.rms_norm_eps, ops)
