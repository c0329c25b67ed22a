"""GLM-4: rotary embedding rotates neighbouring elements in the first half of each head (GLM Team,
2024).

Gate and up are one fused projection. This file is for checkpoints of `GlmForCausalLM`; `glm4.py`
has the later models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, Attention, GatedMLP
from services.worker.models.rope import head_order
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource

# Defaults of `GlmConfig` for missing keys.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2}


@dataclass(frozen=True, kw_only=True)
class GlmConfig(RotaryConfig):
    """Counterpart of Hugging Face's `GlmConfig`."""

    architecture = "GlmForCausalLM"
    default_eos_token_ids = (151329, 151336, 151338)
    default_partial_rotary_factor = 0.5
    turns_neighbours = True

    attention_bias: bool = True  # of queries, keys and values

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        return super().read({**_DEFAULTS, **config})


class GlmStage(RotaryStage):
    """One stage of a GLM-4 model."""

    config_type = GlmConfig
    config: GlmConfig

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(),
            qkv_bias=self.config.attention_bias,
            order=head_order(self.config),
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        size, fused = self.config.intermediate_size, "gate_up_proj"
        return GatedMLP.read(source, prefix, self.config, size=size, fused_name=fused)
