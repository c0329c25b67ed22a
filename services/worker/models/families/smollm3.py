"""SmolLM3: Llama in which every fourth layer has no rotary embedding (Hugging Face, 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.models.config import (
    JsonObject,
    UnsupportedModel,
    read_windows,
)
from services.worker.models.families.llama import LlamaConfig, LlamaStage
from services.worker.models.window_config import LayerWindows

# Defaults of `SmolLM3Config` for missing keys.
_DEFAULT_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LayerWindows, LlamaConfig):
    """Counterpart of Hugging Face's `SmolLM3Config`."""

    architecture = "SmolLM3ForCausalLM"
    default_eos_token_ids = (128001,)
    default_n_kv_heads = 4
    read_keys = LlamaConfig.read_keys | {
        "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window",
        "layer_types",
    }  # fmt: skip
    ignored_keys = frozenset(
        ("pretraining_tp", "max_window_layers")
    )  # the second is a key of Qwen2
    default_rope_theta = 2_000_000.0

    turns: tuple[bool, ...]  # which layers have rotary positions
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        turns = _turning_layers(config)
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        default = [window is not None and not turn for turn in turns]
        return super().read(config) | {
            "turns": turns,
            "windows": read_windows(config, window=window, default=default),
        }


def _turning_layers(config: JsonObject) -> tuple[bool, ...]:
    """Returns, for each layer, whether it has a rotary embedding.

    The key `no_rope_layers` is 1 for layers with a rotary embedding. Without this key, the last of
    every `no_rope_layer_interval` layers has none.
    """
    n_layers = config.get("num_hidden_layers") or 0
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = config.get("no_rope_layer_interval", _DEFAULT_INTERVAL)
        return tuple((i + 1) % interval != 0 for i in range(n_layers))
    if len(listed) != n_layers or any(turns not in (0, 1) for turns in listed):
        raise UnsupportedModel(
            f"config.json: no_rope_layers has {len(listed)} entries for {n_layers} layers, each of "
            "which must be 0 or 1"
        )
    return tuple(bool(turns) for turns in listed)


class SmolLM3Stage(LlamaStage):
    """One stage of a SmolLM3 model."""

    config_type = SmolLM3Config
    config: SmolLM3Config

    def rotary(self, index: int) -> int | None:
        return 0 if self.config.turns[index] else None
