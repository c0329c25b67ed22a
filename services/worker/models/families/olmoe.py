"""OLMoE: experts in every layer, and norms over all heads together (Muennighoff et al., 2024).

One norm is over all heads of queries, another one over all heads of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels import AttentionForm
from services.worker.models.config import Count, PositiveInt
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, Attention
from services.worker.models.families.olmo2 import WideNormAttention
from services.worker.models.mixture import read_experts
from services.worker.models.mixture_config import MixtureConfig
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MixtureConfig):
    """Counterpart of Hugging Face's `OlmoeConfig`."""

    architecture = "OlmoeForCausalLM"
    default_eos_token_ids = (50279,)
    # Both matter to training only.
    ignored_keys = frozenset(("output_router_logits", "router_aux_loss_coef"))

    attention_bias: bool = False
    n_experts: Count = field(default=64, metadata={"alias": "num_experts"})
    n_chosen: PositiveInt = field(default=8, metadata={"alias": "num_experts_per_tok"})
    normalises: bool = field(default=False, metadata={"alias": "norm_topk_prob"})


class OlmoeStage(RotaryStage):
    """One stage of an OLMoE model."""

    config_type = OlmoeConfig
    config: OlmoeConfig

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return WideNormAttention.read_wide(
            source,
            prefix,
            self.config,
            form=AttentionForm(),
            has_bias=self.config.attention_bias,
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        return read_experts(
            source,
            prefix,
            self.config,
            size=self.config.intermediate_size,
            normalises=self.config.normalises,
        )
