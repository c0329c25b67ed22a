"""Qwen3-MoE: Qwen3 with mixtures of experts in most layers (Yang et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.worker.models.config import Count, JsonObject, PositiveInt, UnsupportedModel
from services.worker.models.decoder_layers import MLP
from services.worker.models.families.qwen3 import QwenHeadNormStage
from services.worker.models.mixture import read_experts
from services.worker.models.mixture_config import MixtureConfig
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.sparse_layers import SparseLayers
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import EqualWindowsConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(SparseLayers, EqualWindowsConfig, MixtureConfig):
    """Counterpart of Hugging Face's `Qwen3MoeConfig`."""

    architecture = "Qwen3MoeForCausalLM"
    default_n_kv_heads = 4
    read_keys = RotaryConfig.read_keys | {
        "use_sliding_window", "sliding_window", "num_experts", "num_local_experts",
    }  # fmt: skip
    # The first two matter to training only; the last only if layers have different windows.
    ignored_keys = frozenset(("output_router_logits", "router_aux_loss_coef", "max_window_layers"))

    attention_bias: bool = False
    n_experts: Count
    n_chosen: PositiveInt = field(metadata={"alias": "num_experts_per_tok"})
    expert_size: PositiveInt = field(metadata={"alias": "moe_intermediate_size"})
    normalises: bool = field(default=False, metadata={"alias": "norm_topk_prob"})

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        counts = {config[key] for key in ("num_experts", "num_local_experts") if config.get(key)}
        if len(counts) != 1:
            raise UnsupportedModel(f"config.json: num_experts is {sorted(counts)}, not one number")
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        return super().read(config) | {"window": window, "n_experts": counts.pop()}


class Qwen3MoeStage(QwenHeadNormStage):
    """One stage of a Qwen3-MoE model."""

    config_type = Qwen3MoeConfig
    config: Qwen3MoeConfig

    @property
    def has_attention_bias(self) -> bool:
        return self.config.attention_bias

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        if not self.config.is_sparse(index):
            return super().read_mlp(source, prefix, index)
        return read_experts(
            source,
            prefix,
            self.config,
            size=self.config.expert_size,
            normalises=self.config.normalises,
        )
