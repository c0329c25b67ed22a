"""OLMo 3: OLMo 2 with windows in three layers of four. Layers with windows have a rotary embedding
of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.worker.models.config import (
    JsonObject,
    read_windows,
)
from services.worker.models.families.olmo2 import Olmo2Config, Olmo2Stage
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.rotary_config import RopeConfig, read_rope, rope_of_kinds
from services.worker.models.window_config import LayerWindows

_FULL, _SLIDING = 0, 1  # indices of the rotary embeddings in `make_rotaries`
_DEFAULT_WINDOW = 4096  # default for files without the key


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(LayerWindows, Olmo2Config):
    """Counterpart of Hugging Face's `Olmo3Config`."""

    architecture = "Olmo3ForCausalLM"
    default_eos_token_ids = (50279,)
    read_keys = Olmo2Config.read_keys | {"sliding_window", "layer_types"}
    default_rope_theta = 500_000.0

    sliding_rope: RopeConfig  # for layers with a window; `rope` is for all others

    def check(self) -> None:
        super().check()
        self.check_rope(self.sliding_rope)

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        window = config.get("sliding_window", _DEFAULT_WINDOW)
        sliding = [(i + 1) % 4 != 0 for i in range(config.get("num_hidden_layers") or 0)]
        full, local = _split_rope(config)
        return super().read({**config, **full}) | {
            "windows": read_windows(config, window=window, default=sliding),
            "sliding_rope": read_rope(local, cls.default_rope_theta),
        }


def _split_rope(config: JsonObject) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Splits the rotary settings of `config` into two mappings: for full layers, and for sliding
    layers.

    Each mapping has keys of a `config.json` whose layers are all of that kind (see
    `rope_of_kinds`). Older files have one rotary setting, which stretches the context of full
    layers only. Raises UnsupportedModel for other kinds of layers.
    """
    length = {"max_position_embeddings": config.get("max_position_embeddings")}
    both = config.get("rope_parameters")
    if both is None:
        return {}, length
    full, sliding = rope_of_kinds(both)
    return full, {**sliding, **length}


class Olmo3Stage(Olmo2Stage):
    """One stage of an OLMo 3 model."""

    config_type = Olmo3Config
    config: Olmo3Config

    def make_rotaries(self) -> Sequence[RotaryEmbedding]:
        sliding = replace(self.config, rope=self.config.sliding_rope)
        local = RotaryEmbedding(sliding, dtype=self.dtype, device=self.device)
        return (*super().make_rotaries(), local)  # _FULL, _SLIDING

    def rotary(self, index: int) -> int:
        return _FULL if self.config.layer_windows[index] is None else _SLIDING
