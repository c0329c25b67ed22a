"""Qwen2: Llama with biases on queries, keys and values (Yang et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject, read_windows
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import Attention
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import LayerWindows

# Defaults of `Qwen2Config` and `Qwen3Config` for missing keys.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True, kw_only=True)
class QwenConfig(LayerWindows, RotaryConfig):
    """The fields that the configurations of Qwen2 and later Qwen models share. Only the later
    layers of a model may have windows."""

    read_keys = RotaryConfig.read_keys | {
        "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
    }  # fmt: skip

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        window = None
        if config.get("use_sliding_window"):
            window = config.get("sliding_window", _DEFAULT_WINDOW)
        n_full = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        default = [i >= n_full for i in range(config.get("num_hidden_layers") or 0)]
        return super().read(config) | {
            "windows": read_windows(config, window=window, default=default)
        }


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(QwenConfig):
    """Counterpart of Hugging Face's `Qwen2Config`."""

    architecture = "Qwen2ForCausalLM"


class Qwen2Stage(RotaryStage):
    """One stage of a Qwen2 model."""

    config_type = Qwen2Config

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        form = AttentionForm(window=self.config.layer_windows[index])
        return Attention.read(source, prefix, self.config, form=form, qkv_bias=True)
