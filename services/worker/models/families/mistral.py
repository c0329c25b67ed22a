"""Mistral: Llama with a sliding window in all layers (Jiang et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.models.config import JsonObject
from services.worker.models.decoder import RotaryStage
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.window_config import EqualWindowsConfig

# Default of `MistralConfig` for a missing window; null means no window.
_DEFAULT_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class MistralConfig(EqualWindowsConfig):
    """Counterpart of Hugging Face's `MistralConfig`."""

    architecture = "MistralForCausalLM"
    default_eos_token_ids = (2,)
    default_n_kv_heads = 8
    read_keys = RotaryConfig.read_keys | {"sliding_window"}

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        return super().read(config) | {"window": config.get("sliding_window", _DEFAULT_WINDOW)}


class MistralStage(RotaryStage):
    """One stage of a Mistral model."""

    config_type = MistralConfig
