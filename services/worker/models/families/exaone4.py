"""EXAONE 4: norms after attention and MLP, and over each head (LG AI Research, 2025).

Layers with windows have rotary embedding, and other layers have none. Models without windows have
rotary embedding in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject, UnsupportedModel, read_windows
from services.worker.models.decoder_layers import Attention
from services.worker.models.post_norm_stage import PostNormStage
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.rotary_config import RopeConfig, RotaryConfig
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import LayerWindows

# Defaults of `Exaone4Config` for missing keys.
_DEFAULT_WINDOW, _DEFAULT_PATTERN = 4096, 4

_TURNING, _STILL = 0, 1  # indices of the rotary embeddings in `make_rotaries`
_NO_WAVE = RopeConfig(rope_type="proportional", rope_theta=1.0, partial_rotary_factor=1e-9)


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(LayerWindows, RotaryConfig):
    """Counterpart of Hugging Face's `Exaone4Config`."""

    architecture = "Exaone4ForCausalLM"
    default_eos_token_ids = (2,)
    default_n_kv_heads = 32
    read_keys = RotaryConfig.read_keys | {
        "sliding_window", "sliding_window_pattern", "layer_types",
    }  # fmt: skip

    has_windows: bool  # then layers without a window have no rotary embedding

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        window = config.get("sliding_window", _DEFAULT_WINDOW)
        pattern = config.get("sliding_window_pattern", _DEFAULT_PATTERN)
        n_layers = config.get("num_hidden_layers") or 0
        sliding = [False] * n_layers
        if window is not None and config.get("layer_types") is None:
            if not isinstance(pattern, int) or pattern < 1:
                raise UnsupportedModel(
                    f"config.json: sliding_window_pattern {pattern!r} without layer_types"
                )
            sliding = [(i + 1) % pattern != 0 for i in range(n_layers)]
        return super().read(config) | {
            "windows": read_windows(config, window=window, default=sliding),
            "has_windows": window is not None,
        }


class Exaone4Stage(PostNormStage):
    """One stage of an EXAONE 4 model."""

    config_type = Exaone4Config
    config: Exaone4Config

    def make_rotaries(self) -> Sequence[RotaryEmbedding]:
        turning = super().make_rotaries()
        if not self.config.has_windows:
            return turning
        still = replace(self.config, rope=_NO_WAVE)
        # _TURNING, _STILL
        return (*turning, RotaryEmbedding(still, dtype=self.dtype, device=self.device))

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        window = self.config.layer_windows[index]
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(window=window),
            rotary=_STILL if self.config.has_windows and window is None else _TURNING,
            head_norms=self.read_head_norms(source, prefix),
        )
