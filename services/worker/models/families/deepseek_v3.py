"""DeepSeek-V3: DeepSeek-V2 whose experts are balanced by a bias (DeepSeek-AI, 2024).

Kimi K2 and the text model of Kimi K2.5 also have this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from services.worker.models.config import Count, PositiveFloat, PositiveInt
from services.worker.models.families.deepseek_v2 import DeepseekV2Config, DeepseekV2Stage
from services.worker.models.group_mixture import GroupRouter
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekV2Config):
    """Counterpart of Hugging Face's `DeepseekV3Config`."""

    architecture = "DeepseekV3ForCausalLM"
    default_eos_token_ids = (1,)
    read_keys = DeepseekV2Config.read_keys - {"norm_topk_prob"}
    computed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    }
    default_n_dense = 3
    default_groups = (8, 4)
    n_best = 2

    n_experts: Count = field(default=256, metadata={"alias": "n_routed_experts"})
    n_chosen: PositiveInt = field(default=8, metadata={"alias": "num_experts_per_tok"})
    n_shared: PositiveInt = field(default=1, metadata={"alias": "n_shared_experts"})
    expert_size: PositiveInt = field(default=2048, metadata={"alias": "moe_intermediate_size"})
    score_factor: PositiveFloat = field(default=2.5, metadata={"alias": "routed_scaling_factor"})
    normalises: bool = field(default=True, metadata={"alias": "norm_topk_prob"})


class DeepseekV3Stage(DeepseekV2Stage):
    """One stage of a DeepSeek-V3 model."""

    config_type = DeepseekV3Config
    config: DeepseekV3Config

    def read_router(self, source: TensorSource, prefix: str) -> GroupRouter:
        bias = source.tensor(
            f"{prefix}.e_score_correction_bias", self.config.n_experts, dtype=torch.float32
        )
        router = super().read_router(source, prefix)
        form = replace(router.form, is_softmax=False, normalises=self.config.normalises, bias=bias)
        return replace(router, form=form)
