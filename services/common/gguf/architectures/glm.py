"""GLM-4. It rotates only the first half of each head. The two elements of a rotated pair are
adjacent, as in llama.cpp."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import OUTSIDE, PRE_NORMS
from services.common.gguf.tensor_rules import First, Fused, Rules

_SHARED: Rules = {
    **OUTSIDE,
    **PRE_NORMS,
    "self_attn.q_proj": First(("attn_q", Fused("attn_qkv", "q"))),
    "self_attn.k_proj": First(("attn_k", Fused("attn_qkv", "k"))),
    "self_attn.v_proj": First(("attn_v", Fused("attn_qkv", "v"))),
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _biases(said: Metadata, config: Config) -> Config:
    names = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    # The family needs the size of heads, which the older files leave out.
    head_dim = config["hidden_size"] // max(1, config["num_attention_heads"])
    return {
        "attention_bias": any(said.has(name) for name in names),
        "head_dim": config.get("head_dim", head_dim),
    }


CHATGLM = Architecture(family="GlmForCausalLM", tensors=_SHARED, more=_biases, is_partial=True)
GLM4 = Architecture(
    family="Glm4ForCausalLM",
    tensors={
        **_SHARED,
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    more=_biases,
    is_partial=True,
)
