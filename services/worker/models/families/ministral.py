"""Ministral: Mistral with windows in some layers only (Mistral AI, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.models.config import JsonObject, read_windows
from services.worker.models.decoder import RotaryStage
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.window_config import LayerWindows

# Defaults of `MinistralConfig` for missing keys; null means no window.
_DEFAULT_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(LayerWindows, RotaryConfig):
    """Counterpart of Hugging Face's `MinistralConfig`."""

    architecture = "MinistralForCausalLM"
    default_eos_token_ids = (2,)
    default_n_kv_heads = 8
    read_keys = RotaryConfig.read_keys | {"sliding_window", "layer_types"}

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        window = config.get("sliding_window", _DEFAULT_WINDOW)
        default = [True] * (config.get("num_hidden_layers") or 0)
        return super().read(config) | {
            "windows": read_windows(config, window=window, default=default)
        }


class MinistralStage(RotaryStage):
    """One stage of a Ministral model."""

    config_type = MinistralConfig
