"""Qwen3.5 and 3.6, text only: Qwen3-Next with separate projections and one MLP (Qwen, 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.models.config import JsonObject
from services.worker.models.families.qwen3_next import HybridConfig, HybridStage
from services.worker.models.hybrid import DeltaNetShare
from services.worker.models.layers import ColumnParallelLinear
from services.worker.models.text_half import without_mrope
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(HybridConfig):
    """Counterpart of Hugging Face's `Qwen3_5TextConfig`."""

    architecture = "Qwen3_5ForCausalLM"
    default_n_kv_heads = 4

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        return super().read(one_position(config))


def one_position(config: JsonObject) -> JsonObject:
    """Returns `config` with rotary settings for one position per token.

    The settings in the file give each token three positions, which differ only in images.
    """
    return {**config, "rope_parameters": without_mrope(config.get("rope_parameters"))}


class Qwen35HybridStage(HybridStage):
    """One stage of a Qwen3.5 text model. Subclasses choose between a dense MLP and experts."""

    def read_delta_inputs(
        self, source: TensorSource, prefix: str, share: DeltaNetShare
    ) -> ColumnParallelLinear:
        shape, heads = share.shape, share.value_heads
        qkv = f"{prefix}.in_proj_qkv"
        return ColumnParallelLinear.read(
            source,
            [qkv, qkv, qkv, *(f"{prefix}.in_proj_{name}" for name in "zba")],
            n_in=self.config.hidden_size,
            n_out=(*(shape.n_channels,) * 3, shape.n_values, *(shape.n_value_heads,) * 2),
            shares=(*share.channels, share.values, heads, heads),
            has_bias=False,
        )


class Qwen35Stage(Qwen35HybridStage):
    """One stage of a Qwen3.5 text model."""

    config_type = Qwen35Config
