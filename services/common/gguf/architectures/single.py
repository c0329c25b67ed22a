"""Architectures that each serve a single model family, and have little in common with other
architectures."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.gemma import refuse_other_base, window_layers
from services.common.gguf.architectures.names import (
    DECODER,
    HEAD_NORMS,
    LATE_NORMS,
    MLP,
    OUTSIDE,
    POST_NORMS,
    PRE_NORMS,
    PROJECTIONS,
)
from services.common.gguf.tensor_rules import Transposed

_QUERY_BIAS, _OUTPUT_BIAS = "blk.0.attn_q.bias", "blk.0.attn_output.bias"


def _exaone4(said: Metadata, config: Config) -> Config:
    refuse_other_base(said)
    return {
        **window_layers(said, config),
        "sliding_window": said.integer("attention.sliding_window") or None,
    }


def _seed_oss(said: Metadata, config: Config) -> Config:
    return {"attention_bias": said.has(_QUERY_BIAS), "attention_out_bias": said.has(_OUTPUT_BIAS)}


def _bias(said: Metadata, config: Config) -> Config:
    return {"use_bias": said.has(_QUERY_BIAS)}


EXAONE4 = Architecture(
    family="Exaone4ForCausalLM",
    tensors={**OUTSIDE, **POST_NORMS, **HEAD_NORMS, **PROJECTIONS, **MLP},
    others=frozenset(
        ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
    ),
    more=_exaone4,
)
SEED_OSS = Architecture(
    family="SeedOssForCausalLM",
    tensors={**OUTSIDE, **LATE_NORMS, **PROJECTIONS, **MLP},
    more=_seed_oss,
)
ERNIE4_5 = Architecture(family="Ernie4_5ForCausalLM", tensors=DECODER, more=_bias)
STARCODER2 = Architecture(
    family="Starcoder2ForCausalLM",
    tensors={
        **OUTSIDE,
        **PRE_NORMS,
        **PROJECTIONS,
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    keys={"attention.layer_norm_epsilon": "norm_epsilon"},
    renamed={"attention.layer_norm_rms_epsilon": ""},
    constants={"hidden_act": "gelu_pytorch_tanh"},
    more=_bias,
)
GPT2 = Architecture(
    family="GPT2LMHeadModel",
    tensors={
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": Transposed("attn_qkv"),
        "attn.c_proj": Transposed("attn_output"),
        "mlp.c_fc": Transposed("ffn_up"),
        "mlp.c_proj": Transposed("ffn_down"),
    },
    keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    renamed={
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.head_count_kv": "",
        "attention.key_length": "",
        "attention.layer_norm_rms_epsilon": "",
    },
    has_rope=False,
)
