"""The first Gemma: Llama with Gemma's norms, gate and scaled embeddings (Gemma Team, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.models.config import JsonObject
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import Layer
from services.worker.models.families.gemma2 import GemmaConfig, GemmaStage
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class Gemma1Config(GemmaConfig):
    """Counterpart of Hugging Face's `GemmaConfig`."""

    architecture = "GemmaForCausalLM"
    default_eos_token_ids = (1,)
    read_keys = RotaryConfig.read_keys | {"hidden_activation"}  # without the keys of windows
    ignored_keys = frozenset(("cache_implementation",))
    hidden_acts = (*GemmaConfig.hidden_acts, "gelu")  # the name of this activation in older files

    attn_logit_softcapping: None = None
    final_logit_softcapping: None = None

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        n_layers = config.get("num_hidden_layers") or 0
        fields = cls.read_gemma({"num_key_value_heads": 16, **config}, sliding=[False] * n_layers)
        return fields | {"query_pre_attn_scalar": fields["head_dim"]}


class Gemma1Stage(GemmaStage):
    """One stage of a Gemma model."""

    config_type = Gemma1Config

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        return RotaryStage.read_layer(self, source, prefix, index)
