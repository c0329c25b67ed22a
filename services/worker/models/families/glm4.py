"""GLM-4 of 2025: GLM-4 with additional norms after attention and after the MLP (GLM Team, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.models.decoder_layers import Layer, Norm
from services.worker.models.families.glm import GlmConfig, GlmStage
from services.worker.models.layer_forms import SandwichLayer
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class Glm4Config(GlmConfig):
    """Counterpart of Hugging Face's `Glm4Config`."""

    architecture = "Glm4ForCausalLM"
    default_eos_token_ids = (151329, 151336, 151338)


class Glm4Stage(GlmStage):
    """One stage of a GLM-4 model of 2025."""

    config_type = Glm4Config
    config: Glm4Config

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        def norm(name: str) -> Norm:
            return self.read_norm(source, f"{prefix}.{name}_layernorm", self.config.hidden_size)

        return SandwichLayer(
            norm("input"),
            self.read_attention(source, f"{prefix}.self_attn", index),
            norm("post_self_attn"),
            norm("post_attention"),
            self.read_mlp(source, f"{prefix}.mlp", index),
            norm("post_mlp"),
        )
