"""Decoders whose layers normalise the results of attention and of the MLP, not their inputs."""

from __future__ import annotations

from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import Layer, Norm
from services.worker.models.layer_forms import PostNormLayer
from services.worker.models.weights import TensorSource


class PostNormStage(RotaryStage):
    """One stage of a decoder with a norm after attention and a norm after the MLP."""

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        def norm(name: str) -> Norm:
            return self.read_norm(source, f"{prefix}.{name}_layernorm", self.config.hidden_size)

        return PostNormLayer(
            self.read_attention(source, f"{prefix}.self_attn", index),
            norm("post_attention"),
            self.read_mlp(source, f"{prefix}.mlp", index),
            norm("post_feedforward"),
        )
