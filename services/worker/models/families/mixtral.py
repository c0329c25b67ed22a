"""Mixtral: Mistral with a mixture of experts in every layer (Jiang et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.models.config import Count, PositiveInt
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP
from services.worker.models.mixture import read_experts
from services.worker.models.mixture_config import MixtureConfig
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import EqualWindowsConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(EqualWindowsConfig, MixtureConfig):
    """Counterpart of Hugging Face's `MixtralConfig`."""

    architecture = "MixtralForCausalLM"
    default_eos_token_ids = (2,)
    default_n_kv_heads = 8
    # All three matter to training only.
    ignored_keys = frozenset(
        ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    )
    default_rope_theta = 1_000_000.0
    experts_key = "num_local_experts"

    window: PositiveInt | None = field(default=None, metadata={"alias": "sliding_window"})
    n_experts: Count = field(metadata={"alias": "num_local_experts"})
    n_chosen: PositiveInt = field(metadata={"alias": "num_experts_per_tok"})


class MixtralStage(RotaryStage):
    """One stage of a Mixtral model."""

    config_type = MixtralConfig
    config: MixtralConfig

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        # The tensors of Hugging Face's Mixtral have another prefix than Llama's.
        place = prefix.removesuffix("mlp") + "block_sparse_moe"
        return read_experts(
            source,
            place,
            self.config,
            names=("w1", "w3", "w2"),
            size=self.config.intermediate_size,
            normalises=True,
        )
