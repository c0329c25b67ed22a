"""DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash: latent attention, and groups of experts."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import EXPERTS, MLP, OUTSIDE, PRE_NORMS
from services.common.gguf.rope import log_scale
from services.common.gguf.tensor_rules import First, LatentHeads, Rules

_SIGMOID = 2  # number of the function that turns scores into weights
_TENSORS: Rules = {
    **OUTSIDE,
    **PRE_NORMS,
    **MLP,
    **EXPERTS,
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": First((LatentHeads("attn_k_b", "attn_v_b"), "attn_kv_b")),
    "self_attn.o_proj": "attn_output",
    "mlp.gate.e_score_correction_bias": First(("exp_probs_b.bias", "exp_probs_b.")),
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def _deepseek(said: Metadata, config: Config) -> Config:
    n_turned = said.needed("rope.dimension_count")
    key_dim = said.integer("attention.key_length_mla") or said.needed("attention.key_length")
    value_dim = said.integer("attention.value_length_mla") or said.needed("attention.value_length")
    rope = config.get("rope_scaling")
    return {
        **_experts(said),
        **({} if not rope else {"rope_scaling": {**rope, **log_scale(said, has_tenth=True)}}),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": said.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": n_turned,
        "qk_nope_head_dim": key_dim - n_turned,
        "v_head_dim": value_dim,
    }


def _experts(said: Metadata) -> Config:
    """Returns the configuration keys that determine how experts are chosen. Old files do not state
    whether the scores of experts pass through a sigmoid or a softmax. Such a file means a sigmoid
    if it has a tensor `exp_probs_b`, a bias that is added to the scores.

    Raises:
        ValueError: scores pass through a softmax, and the weights of the experts are normalised.
    """
    function = said.integer("expert_gating_func")
    has_bias = said.has_in_layers("exp_probs_b.bias") or said.has_in_layers("exp_probs_b")
    n_groups = said.integer("expert_group_count") or 1
    normalises = bool(said.value("expert_weights_norm"))
    groups = {"n_group": n_groups, "topk_group": said.integer("expert_group_used_count") or 1}
    if function == _SIGMOID or (not function and has_bias):
        return {
            **groups,
            "architectures": ["DeepseekV3ForCausalLM"],
            "norm_topk_prob": normalises,
        }
    if normalises:
        raise ValueError(f"{said.name('expert_weights_norm')} with a softmax is not supported")
    return {**groups, "topk_method": "greedy" if n_groups == 1 else "group_limited_greedy"}


_OTHERS = frozenset((
    "attention.head_count_kv", "attention.key_length", "attention.key_length_mla",
    "attention.q_lora_rank", "attention.value_length_mla", "expert_gating_func",
    "expert_group_count", "expert_group_used_count", "expert_weights_norm",
))  # fmt: skip
DEEPSEEK2 = Architecture(
    family="DeepseekV2ForCausalLM",
    tensors=_TENSORS,
    keys={
        "attention.kv_lora_rank": "kv_lora_rank",
        "expert_count": "n_routed_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
    },
    renamed={"attention.key_length": "", "attention.head_count_kv": ""},
    others=_OTHERS,
    more=_deepseek,
)
