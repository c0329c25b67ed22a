"""ERNIE 4.5, dense: Llama whose rotary embedding rotates neighbouring elements (Baidu, 2025)."""

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

# Defaults of `Ernie4_5Config` for missing keys.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2}


@dataclass(frozen=True, kw_only=True)
class Ernie4_5Config(RotaryConfig):
    """Counterpart of Hugging Face's `Ernie4_5Config`."""

    architecture = "Ernie4_5ForCausalLM"
    default_eos_token_ids = (2,)
    default_rope_theta = 500_000.0
    turns_neighbours = True

    use_bias: bool = False  # in every projection
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        return super().read({**_DEFAULTS, **config})


class Ernie4_5Stage(RotaryStage):
    """One stage of an ERNIE 4.5 model."""

    config_type = Ernie4_5Config
    config: Ernie4_5Config

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        has_bias = self.config.use_bias
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(),
            qkv_bias=has_bias,
            output_bias=has_bias,
            order=head_order(self.config),
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        size, has_bias = self.config.intermediate_size, self.config.use_bias
        return GatedMLP.read(source, prefix, self.config, size=size, has_bias=has_bias)
