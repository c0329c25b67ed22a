"""Phi-3 and Phi-4: Llama with fused projections and "longrope" angles (Abdin et al., 2024).

"longrope" has two sets of factors; `rope.py` says which set is used. In the small models of Phi-4
only a part of each head is rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject, UnsupportedModel, require
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, Attention, GatedMLP
from services.worker.models.rope import head_order
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import EqualWindowsConfig

# Defaults of `Phi3Config` for missing keys.
_DEFAULT_ORIGINAL_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class Phi3Config(EqualWindowsConfig):
    """Counterpart of Hugging Face's `Phi3Config`."""

    architecture = "Phi3ForCausalLM"
    default_eos_token_ids = (32000,)
    read_keys = RotaryConfig.read_keys | {
        "sliding_window", "original_max_position_embeddings", "full_attn_mod", "interpolate_factor",
    }  # fmt: skip
    # Keys for training.
    ignored_keys = frozenset(("resid_pdrop", "embd_pdrop"))
    default_partial_rotary_factor = 1.0

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, full_attn_mod=(1, None), interpolate_factor=(1, None))
        return super().read({**config, **_longrope(config)}) | {
            "window": config.get("sliding_window")
        }


def _longrope(config: JsonObject) -> JsonObject:
    """Converts Phi's "longrope" settings to the names that other families use. Returns them under
    the key of the rotary settings."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(key) or {})
    rope_type = rope.pop("rope_type", None) or rope.get("type") or "default"
    if rope_type in ("su", "yarn"):  # in older files
        rope_type = "longrope"
    if rope_type not in ("default", "longrope"):
        raise UnsupportedModel(f"config.json: rope_type {rope_type!r} is not supported here")
    if rope_type == "longrope":
        original = config.get("original_max_position_embeddings") or _DEFAULT_ORIGINAL_LENGTH
        rope["original_max_position_embeddings"] = original
    return {key: {**rope, "rope_type": rope_type}}


class Phi3Stage(RotaryStage):
    """One stage of a Phi-3 or Phi-4 model."""

    config_type = Phi3Config

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(window=self.config.layer_windows[index]),
            fused_name="qkv_proj",
            order=head_order(self.config),
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        size, fused = self.config.intermediate_size, "gate_up_proj"
        return GatedMLP.read(source, prefix, self.config, size=size, fused_name=fused)
