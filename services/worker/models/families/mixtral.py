"""Mixtral: Mistral with a mixture of experts in every layer (Jiang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.models.config import Count, PositiveInt
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP
from services.worker.models.mixture import read_experts
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RotaryConfig):
    """Counterpart of Hugging Face's `MixtralConfig`."""

    architecture = "MixtralForCausalLM"
    default_eos_token_ids = (2,)
    default_n_kv_heads = 8
    # All three matter to training only.
    ignored_keys = frozenset(
        ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    )
    default_rope_theta = 1_000_000.0

    window: PositiveInt | None = field(default=None, metadata={"alias": "sliding_window"})
    n_experts: Count = field(metadata={"alias": "num_local_experts"})
    n_chosen: PositiveInt = field(metadata={"alias": "num_experts_per_tok"})

    def check(self) -> None:
        super().check()
        if self.n_chosen > self.n_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.n_chosen}) is more than num_local_experts "
                f"({self.n_experts})"
            )

    @property
    def layer_windows(self) -> Sequence[int | None]:
        return (self.window,) * self.n_layers


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
            names=("w1", "w3", "w2"),
            hidden_size=self.config.hidden_size,
            size=self.config.intermediate_size,
            n_experts=self.config.n_experts,
            n_chosen=self.config.n_chosen,
            normalises=True,
        )
