"""Qwen3.5-MoE and 3.6-MoE, text only: Qwen3.5 with experts in every layer (Qwen, 2026)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.worker.models.config import Count, JsonObject, PositiveInt
from services.worker.models.decoder_layers import MLP
from services.worker.models.families.qwen3_5 import Qwen35HybridStage, one_position
from services.worker.models.families.qwen3_next import SparseHybridConfig
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(SparseHybridConfig):
    """Counterpart of Hugging Face's `Qwen3_5MoeTextConfig`."""

    architecture = "Qwen3_5MoeForCausalLM"
    default_n_kv_heads = 2
    # Size of an MLP that no layer has.
    ignored_keys = SparseHybridConfig.ignored_keys | {"intermediate_size"}

    n_experts: Count = field(default=256, metadata={"alias": "num_experts"})
    n_chosen: PositiveInt = field(default=8, metadata={"alias": "num_experts_per_tok"})

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        fields = super().read(one_position(config))
        return fields | {"intermediate_size": config.get("moe_intermediate_size", 512)}


class Qwen35MoeStage(Qwen35HybridStage):
    """One stage of a Qwen3.5-MoE text model."""

    config_type = Qwen35MoeConfig
    config: Qwen35MoeConfig

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        return self.read_mixture(source, prefix, self.config, normalises=True)
