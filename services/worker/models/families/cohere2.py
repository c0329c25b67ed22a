"""Command R7B and Command A: Command R with windows in three layers of four (Cohere, 2024).

The fourth layer has no window and no rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.models.config import JsonObject, read_windows
from services.worker.models.families.cohere import CohereConfig, CohereStage
from services.worker.models.window_config import LayerWindows

# Defaults of `Cohere2Config` for missing keys.
_DEFAULT_WINDOW = 4096
_DEFAULT_PATTERN = 4


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(LayerWindows, CohereConfig):
    """Counterpart of Hugging Face's `Cohere2Config`."""

    architecture = "Cohere2ForCausalLM"
    default_eos_token_ids = (255001,)
    default_rope_theta = 10_000.0
    read_keys = CohereConfig.read_keys | {"sliding_window", "sliding_window_pattern", "layer_types"}
    # `layer_switch` repeats `sliding_window_pattern`.
    ignored_keys = frozenset(("cache_implementation", "layer_switch"))

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        window = config.get("sliding_window", _DEFAULT_WINDOW)
        pattern = config.get("sliding_window_pattern", _DEFAULT_PATTERN)
        sliding = [(i + 1) % pattern != 0 for i in range(config.get("num_hidden_layers") or 0)]
        return super().read(config) | {
            "windows": read_windows(config, window=window, default=sliding)
        }


class Cohere2Stage(CohereStage):
    """One stage of a Command R7B or Command A model."""

    config_type = Cohere2Config
    config: Cohere2Config

    def rotary(self, index: int) -> int | None:
        return None if self.config.layer_windows[index] is None else 0
