"""GLM-4.7-Flash: DeepSeek-V3 with different sizes (GLM-4.5 Team, 2025)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.worker.models.config import (
    Count,
    JsonObject,
    PositiveFloat,
    PositiveInt,
    UnsupportedModel,
)
from services.worker.models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3Stage


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """Counterpart of Hugging Face's `Glm4MoeLiteConfig`."""

    architecture = "Glm4MoeLiteForCausalLM"
    default_eos_token_ids = (1,)
    read_keys = DeepseekV3Config.read_keys | {"mlp_layer_types"}
    default_query_rank = 768
    default_still_dim = 192
    default_n_dense = 1
    default_groups = (1, 1)

    value_dim: PositiveInt = field(default=256, metadata={"alias": "v_head_dim"})
    n_experts: Count = field(default=64, metadata={"alias": "n_routed_experts"})
    n_chosen: PositiveInt = field(default=4, metadata={"alias": "num_experts_per_tok"})
    expert_size: PositiveInt = field(default=1536, metadata={"alias": "moe_intermediate_size"})
    score_factor: PositiveFloat = field(default=1.8, metadata={"alias": "routed_scaling_factor"})

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        fields = super().read(config)
        kinds = config.get("mlp_layer_types")
        if kinds is None:
            return fields
        unknown = set(kinds) - {"dense", "sparse"}
        if unknown or len(kinds) != config.get("num_hidden_layers"):
            raise UnsupportedModel(
                f"config.json: mlp_layer_types has {len(kinds)} entries for "
                f"{config.get('num_hidden_layers')} layers, of unknown types {sorted(unknown)}"
            )
        return fields | {"are_sparse": tuple(kind == "sparse" for kind in kinds)}


class Glm4MoeLiteStage(DeepseekV3Stage):
    """One stage of a GLM-4.7-Flash model."""

    config_type = Glm4MoeLiteConfig
    config: Glm4MoeLiteConfig
