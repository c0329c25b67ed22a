"""Granite 3: Llama with constant factors for embeddings, scores, residuals and logits (IBM,
2024)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels import AttentionForm
from services.worker.models.config import PositiveFloat
from services.worker.models.decoder_layers import Embedding, Head, Layer
from services.worker.models.families.llama import LlamaConfig, LlamaStage
from services.worker.models.layer_forms import ScaledEmbedding, ScaledHead, ScaledLayer
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Counterpart of Hugging Face's `GraniteConfig`."""

    architecture = "GraniteForCausalLM"
    default_eos_token_ids = (2,)

    embedding_multiplier: PositiveFloat = 1.0
    attention_multiplier: PositiveFloat = 1.0  # factor of scores, instead of 1 / sqrt(head_dim)
    residual_multiplier: PositiveFloat = 1.0  # factor of the output of attention and of the MLP
    logits_scaling: PositiveFloat = 1.0  # divisor of logits


class GraniteStage(LlamaStage):
    """One stage of a Granite model."""

    config_type = GraniteConfig
    config: GraniteConfig

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        return ScaledEmbedding(tokens, self.config.embedding_multiplier)

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        hidden_size = self.config.hidden_size
        return ScaledLayer(
            self.read_norm(source, f"{prefix}.input_layernorm", hidden_size),
            self.read_attention(source, f"{prefix}.self_attn", index),
            self.read_norm(source, f"{prefix}.post_attention_layernorm", hidden_size),
            self.read_mlp(source, f"{prefix}.mlp", index),
            self.config.residual_multiplier,
        )

    def form(self, index: int) -> AttentionForm:
        return AttentionForm(scale=self.config.attention_multiplier)

    def read_head(self, source: TensorSource) -> Head:
        return ScaledHead(super().read_head(source), 1 / self.config.logits_scaling)
