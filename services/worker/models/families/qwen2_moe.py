"""Qwen2-MoE: Qwen2 with experts, and a shared expert for every token (Yang et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import Count, JsonObject, PositiveInt, read_windows
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, Attention, GatedMLP
from services.worker.models.mixture import SharedExpert, read_experts
from services.worker.models.mixture_config import MixtureConfig
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.sparse_layers import SparseLayers
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import LayerWindows

# Defaults of `Qwen2MoeConfig` for missing keys.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(LayerWindows, SparseLayers, MixtureConfig):
    """Counterpart of Hugging Face's `Qwen2MoeConfig`."""

    architecture = "Qwen2MoeForCausalLM"
    read_keys = RotaryConfig.read_keys | {
        "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
    }  # fmt: skip
    # Both matter to training only.
    ignored_keys = frozenset(("output_router_logits", "router_aux_loss_coef"))

    qkv_bias: bool = True
    n_experts: Count = field(default=60, metadata={"alias": "num_experts"})
    n_chosen: PositiveInt = field(default=4, metadata={"alias": "num_experts_per_tok"})
    expert_size: PositiveInt = field(default=1408, metadata={"alias": "moe_intermediate_size"})
    shared_expert_size: PositiveInt = field(
        default=5632, metadata={"alias": "shared_expert_intermediate_size"}
    )
    normalises: bool = field(default=False, metadata={"alias": "norm_topk_prob"})

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        window = None
        if config.get("use_sliding_window"):
            window = config.get("sliding_window", _DEFAULT_WINDOW)
        n_sliding = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        # Every second one of the first layers has a window, unlike in Qwen2.
        n_layers = config.get("num_hidden_layers") or 0
        default = [i % 2 == 0 and i < n_sliding for i in range(n_layers)]
        return super().read(config) | {
            "windows": read_windows(config, window=window, default=default)
        }


class Qwen2MoeStage(RotaryStage):
    """One stage of a Qwen2-MoE model."""

    config_type = Qwen2MoeConfig
    config: Qwen2MoeConfig

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        form = AttentionForm(window=self.config.layer_windows[index])
        has_bias = self.config.qkv_bias
        return Attention.read(source, prefix, self.config, form=form, qkv_bias=has_bias)

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        if not self.config.is_sparse(index):
            return super().read_mlp(source, prefix, index)
        size = self.config.shared_expert_size
        shared = GatedMLP.read(source, f"{prefix}.shared_expert", self.config, size=size)
        hidden_size = self.config.hidden_size
        return read_experts(
            source,
            prefix,
            self.config,
            size=self.config.expert_size,
            normalises=self.config.normalises,
            shared=SharedExpert.read(source, prefix, shared, hidden_size=hidden_size),
        )
