"""Llama and its descendants whose query and key elements are stored in llama.cpp's order of
rotation."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import DECODER, EXPERTS
from services.common.gguf.rope import log_scale
from services.common.gguf.tensor_rules import Pairs, Rules

_TENSORS: Rules = {
    **DECODER,
    "self_attn.q_proj": Pairs("attn_q", "q"),
    "self_attn.k_proj": Pairs("attn_k", "kv"),
}
# Mixtral has other names for its experts.
_MIXTRAL: Rules = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{}.w1": EXPERTS["mlp.experts.{}.gate_proj"],
    "block_sparse_moe.experts.{}.w2": EXPERTS["mlp.experts.{}.down_proj"],
    "block_sparse_moe.experts.{}.w3": EXPERTS["mlp.experts.{}.up_proj"],
}


def _biases(said: Metadata) -> Config:
    return {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_gate.bias"),
    }


def _llama(said: Metadata, config: Config) -> Config:
    n_experts = said.integer("expert_count")
    if not n_experts:
        return _biases(said)
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": n_experts,
        "num_experts_per_tok": said.needed("expert_used_count"),
    }


def _granite(said: Metadata, config: Config) -> Config:
    if said.value("rope.scaling.finetuned") is False:  # how these files say it
        raise ValueError(
            f"{said.name('rope.scaling.finetuned')} is false: no positions are rotated"
        )
    return _biases(said)


def _mistral3(said: Metadata, config: Config) -> Config:
    """Returns the configuration keys that scale queries by position. If the file has no such scale,
    returns keys that make the model a plain Mistral."""
    growth = said.number("attention.temperature_scale")
    if not growth:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    rope = {
        "rope_theta": config.pop("rope_theta", None),
        **config.pop("rope_scaling", {}),
        **log_scale(said, has_tenth=False),
        "llama_4_scaling_beta": float(growth),
    }
    return {"rope_parameters": {key: value for key, value in rope.items() if value is not None}}


LLAMA = Architecture(
    family="LlamaForCausalLM",
    tensors={**_TENSORS, **_MIXTRAL},
    others=frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length")),
    more=_llama,
)
GRANITE = Architecture(
    family="GraniteForCausalLM",
    tensors=_TENSORS,
    keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    more=_granite,
)
SMOLLM3 = Architecture(family="SmolLM3ForCausalLM", tensors=_TENSORS)
MISTRAL3 = Architecture(
    family="Ministral3ForCausalLM",
    tensors=_TENSORS,
    others=frozenset(("attention.temperature_scale",)),
    more=_mistral3,
)
