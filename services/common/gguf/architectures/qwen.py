"""Qwen 2 and 3, with and without experts, and the text models of their variants that take
images."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import DECODER, EXPERTS, HEAD_NORMS
from services.common.gguf.tensor_rules import OneRow, Rules

# Positions in three dimensions are equal in text, and additional inputs of layers come from images.
_IMAGE_KEYS = frozenset(("rope.dimension_sections", "n_deepstack_layers"))
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SHARED_EXPERT: Rules = {
    "mlp.shared_expert_gate": OneRow("ffn_gate_inp_shexp"),
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def _norm_topk(said: Metadata, config: Config) -> Config:
    """Returns the configuration key that says whether the weights of the chosen experts are scaled
    to add up to one. If the file has no key for this, the weights are scaled."""
    weights_norm = said.value("expert_weights_norm")
    return {"norm_topk_prob": True if weights_norm is None else bool(weights_norm)}


QWEN2 = Architecture(family="Qwen2ForCausalLM", tensors=DECODER, others=_IMAGE_KEYS)
QWEN3 = Architecture(
    family="Qwen3ForCausalLM", tensors={**DECODER, **HEAD_NORMS}, others=_IMAGE_KEYS
)
QWEN2_MOE = Architecture(
    family="Qwen2MoeForCausalLM",
    tensors={**DECODER, **EXPERTS, **SHARED_EXPERT},
    keys={
        **_EXPERT_KEYS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    constants={"norm_topk_prob": False},
)
QWEN3_MOE = Architecture(
    family="Qwen3MoeForCausalLM",
    tensors={**DECODER, **HEAD_NORMS, **EXPERTS},
    keys=_EXPERT_KEYS,
    others=_IMAGE_KEYS | {"expert_weights_norm"},
    more=_norm_topk,
)
