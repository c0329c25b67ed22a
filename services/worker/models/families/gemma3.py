"""Gemma 3, text only: Gemma 2 with norms over heads and two rotary embeddings (Gemma Team, 2025).

Five layers in six have a window. Their rotary base is smaller than the base of the sixth layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.worker.models.config import JsonObject, PositiveFloat
from services.worker.models.decoder_layers import Attention
from services.worker.models.families.gemma2 import GemmaConfig, GemmaStage
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.rotary_config import RopeConfig, read_rope, rope_of_kinds
from services.worker.models.weights import TensorSource

_FULL, _SLIDING = 0, 1  # indices of the rotary embeddings in `make_rotaries`


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Counterpart of Hugging Face's `Gemma3TextConfig`."""

    architecture = "Gemma3ForCausalLM"
    default_eos_token_ids = (1,)
    default_n_kv_heads = 4
    read_keys = GemmaConfig.read_keys | {
        "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern",
    }  # fmt: skip
    default_rope_theta = 1_000_000.0

    # Files have this key, but no implementation computes it: a value is refused.
    attn_logit_softcapping: None = None
    final_logit_softcapping: PositiveFloat | None = None
    sliding_rope: RopeConfig  # for layers with a window; `rope` is for all others

    def check(self) -> None:
        super().check()
        self.check_rope(self.sliding_rope)

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        keys = ("sliding_window_pattern", "_sliding_window_pattern")
        pattern = next((config[key] for key in keys if config.get(key)), 6)
        sliding = [(i + 1) % pattern != 0 for i in range(config.get("num_hidden_layers") or 0)]
        full, local = split_rope(config)
        return cls.read_gemma({**config, **full}, sliding=sliding) | {
            "sliding_rope": read_rope(local, default_theta=10_000.0)
        }


def split_rope(config: JsonObject) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Splits the rotary settings of `config` into two mappings: for full layers, and for sliding
    layers.

    Each mapping has keys of a `config.json` whose layers are all of that kind (see
    `rope_of_kinds`). Raises UnsupportedModel for other kinds of layers.
    """
    both = config.get("rope_parameters")
    if both is None:
        return {}, {"rope_theta": config.get("rope_local_base_freq")}
    return rope_of_kinds(both)


class Gemma3Stage(GemmaStage):
    """One stage of a Gemma 3 text model."""

    config_type = Gemma3Config
    config: Gemma3Config

    def make_rotaries(self) -> Sequence[RotaryEmbedding]:
        sliding = replace(self.config, rope=self.config.sliding_rope)
        local = RotaryEmbedding(sliding, dtype=self.dtype, device=self.device)
        return (*super().make_rotaries(), local)  # _FULL, _SLIDING

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return Attention.read(
            source,
            prefix,
            self.config,
            form=self.form(index),
            qkv_bias=self.config.attention_bias,
            output_bias=self.config.attention_bias,
            rotary=_FULL if self.config.layer_windows[index] is None else _SLIDING,
            head_norms=self.read_head_norms(source, prefix),
        )
