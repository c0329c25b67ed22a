"""Names of tensors that many architectures share. Each mapping has the names of tensors in a GGUF
file, keyed by their names in the model family."""

from __future__ import annotations

from services.common.gguf.tensor_rules import First, Item, Numbered, PlusOne, Rules

OUTSIDE: Rules = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
"""Names of the tensors outside of layers."""

PROJECTIONS: Rules = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
MLP: Rules = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEAD_NORMS: Rules = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
PRE_NORMS: Rules = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
LATE_NORMS: Rules = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
"""Names of norms in architectures whose files call the norm between attention and MLP
`post_attention_norm`."""

POST_NORMS: Rules = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SANDWICH_NORMS: Rules = {
    "input_layernorm": "attn_norm",
    **POST_NORMS,
    "pre_feedforward_layernorm": "ffn_norm",
}
EXPERTS: Rules = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": First((Item("ffn_gate_exps"), Numbered("ffn_gate.{}"))),
    "mlp.experts.{}.up_proj": First((Item("ffn_up_exps"), Numbered("ffn_up.{}"))),
    "mlp.experts.{}.down_proj": First((Item("ffn_down_exps"), Numbered("ffn_down.{}"))),
}
"""Names of a router and its experts. In old files each expert has tensors of its own."""

DECODER: Rules = {**OUTSIDE, **PRE_NORMS, **PROJECTIONS, **MLP}
"""Names of the tensors of a model that is built like Llama."""


def plus_one(rules: Rules) -> Rules:
    """Returns `rules` in which the rule of each norm is replaced by a `PlusOne`, because the file
    has the scales of norms plus 1."""
    return {
        name: PlusOne(rule) if isinstance(rule, str) and name.endswith("norm") else rule
        for name, rule in rules.items()
    }
