"""Qwen3-Next and Qwen3.5. Most of their layers keep a state instead of keys and values."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import (
    EXPERTS,
    HEAD_NORMS,
    LATE_NORMS,
    MLP,
    OUTSIDE,
    PROJECTIONS,
    plus_one,
)
from services.common.gguf.architectures.qwen import SHARED_EXPERT
from services.common.gguf.tensor_rules import (
    Decay,
    First,
    Kernel,
    KeyGroups,
    Rules,
    ValueHeads,
)

_SHARED: Rules = {
    **plus_one({**OUTSIDE, **LATE_NORMS, **HEAD_NORMS}),
    **PROJECTIONS,
    "linear_attn.norm": "ssm_norm",
}
_TILED: Rules = {
    "linear_attn.in_proj_qkv": ValueHeads("attn_qkv", "values", skips_keys=True),
    "linear_attn.in_proj_z": ValueHeads("attn_gate", "values"),
    "linear_attn.in_proj_b": ValueHeads("ssm_beta", "one"),
    "linear_attn.in_proj_a": ValueHeads("ssm_alpha", "one"),
    "linear_attn.out_proj": ValueHeads("ssm_out", "values", is_columns=True),
    "linear_attn.conv1d": Kernel("ssm_conv1d", is_tiled=True),
    "linear_attn.A_log": Decay("ssm_a.", is_tiled=True),
    "linear_attn.dt_bias": ValueHeads("ssm_dt.bias", "one"),
}
_GROUPED: Rules = {
    "linear_attn.in_proj_qkvz": KeyGroups("attn_qkv", "attn_gate"),
    "linear_attn.in_proj_ba": First(("ssm_ba", "ssm_beta_alpha")),
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": Kernel("ssm_conv1d", is_tiled=False),
    "linear_attn.A_log": Decay("ssm_a.", is_tiled=False),
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_OTHERS = frozenset((
    "ssm.inner_size", "full_attention_interval", "attention.recurrent_layers",
    "rope.dimension_sections",
))  # fmt: skip
_DEFAULT_INTERVAL = 4  # every fourth layer has attention


def _layers(said: Metadata, config: Config) -> Config:
    """Returns two configuration keys: one says which layers have attention, and the other one has
    the number of elements of a value head in the layers without attention."""
    n_layers = config["num_hidden_layers"]
    recurrent = said.per_layer("attention.recurrent_layers", n_layers)
    if recurrent is None:
        interval = said.integer("full_attention_interval") or _DEFAULT_INTERVAL
        recurrent = [(i + 1) % interval != 0 for i in range(n_layers)]
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_value_head_dim": said.needed("ssm.inner_size")
        // max(1, said.needed("ssm.time_step_rank")),
    }


QWEN3_NEXT = Architecture(
    family="Qwen3NextForCausalLM",
    tensors={**_SHARED, **MLP, **EXPERTS, **SHARED_EXPERT, **_GROUPED},
    keys={**_KEYS, **_EXPERT_KEYS},
    others=_OTHERS,
    constants={"norm_topk_prob": True},
    more=_layers,
    is_partial=True,
)
QWEN35 = Architecture(
    family="Qwen3_5ForCausalLM",
    tensors={**_SHARED, **MLP, **_TILED},
    keys=_KEYS,
    others=_OTHERS,
    more=_layers,
    is_partial=True,
)
QWEN35_MOE = Architecture(
    family="Qwen3_5MoeForCausalLM",
    tensors={**_SHARED, **EXPERTS, **SHARED_EXPERT, **_TILED},
    keys={**_KEYS, **_EXPERT_KEYS},
    others=_OTHERS,
    more=_layers,
    is_partial=True,
)
