"""Gemma 3n and 4. Their last layers may attend to the keys and values of earlier layers."""

from __future__ import annotations

from statistics import NormalDist

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.gemma import window_layers
from services.common.gguf.architectures.names import (
    HEAD_NORMS,
    MLP,
    OUTSIDE,
    PROJECTIONS,
    SANDWICH_NORMS,
)
from services.common.gguf.tensor_rules import Both, First, Item, Rules

_SHARED: Rules = {
    **OUTSIDE,
    **SANDWICH_NORMS,
    **HEAD_NORMS,
    **PROJECTIONS,
    **MLP,
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_ALTUP: Rules = {
    "model.altup_projections.{}": Item("altup_proj"),
    "model.altup_unembed_projections.{}": Item("altup_unembd_proj"),
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.correct_output_scale": "altup_correct_scale",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_EXPERTS: Rules = {
    "layer_scalar": "layer_output_scale",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": First(
        ("ffn_gate_up_exps", Both("ffn_gate_exps", "ffn_up_exps", alternates=False))
    ),
    "experts.down_proj": "ffn_down_exps",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_CONSTANTS = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
_DEFAULT_BASE, _DEFAULT_LOCAL_BASE = 1_000_000.0, 10_000.0  # rotary bases
_NOT_ROTATED = 1e29  # divisors of frequencies above this mark elements that are not rotated


def _per_layer(said: Metadata) -> Config:
    """Returns the configuration key for the number of tokens in the table of per-layer inputs.
    Returns an empty configuration if the file has no such table."""
    n_rows = said.n_rows("per_layer_token_embd.weight")
    return {} if n_rows is None else {"vocab_size_per_layer_input": n_rows}


def _bases(said: Metadata, config: Config) -> tuple[float, float]:
    """Returns the rotary base of layers without a window, and the rotary base of layers with a
    window. Removes `rope_theta` from `config`."""
    local = said.number("rope.freq_base_swa")
    base = config.pop("rope_theta", _DEFAULT_BASE)
    return base, _DEFAULT_LOCAL_BASE if local is None else float(local)


def _gemma3n(said: Metadata, config: Config) -> Config:
    n_layers = config["num_hidden_layers"]
    base, local_base = _bases(said, config)
    deviations = said.per_layer("activation_sparsity_scale", n_layers) or [-float("inf")] * n_layers
    rank = said.n_rows("blk.0.laurel_l.weight")
    return {
        **_per_layer(said),
        **window_layers(said, config),
        **({} if rank is None else {"laurel_rank": rank}),
        "final_logit_softcapping": said.number("final_logit_softcapping") or 30.0,
        "intermediate_size": said.per_layer("feed_forward_length", n_layers),
        # The file has the number of standard deviations above which gates are kept.
        "activation_sparsity_pattern": [NormalDist().cdf(each) for each in deviations],
        "rope_theta": base,
        "rope_local_base_freq": local_base,
    }


def _gemma4(said: Metadata, config: Config) -> Config:
    n_layers = config["num_hidden_layers"]
    base, local_base = _bases(said, config)
    sizes = said.per_layer("feed_forward_length", n_layers)
    windows = said.per_layer("attention.sliding_window_pattern", n_layers)
    if not sizes or not windows:
        raise ValueError(
            f"{said.name('feed_forward_length')} or attention.sliding_window_pattern is missing"
        )
    full = [i for i, has_window in enumerate(windows) if not has_window]
    sliding = [i for i, has_window in enumerate(windows) if has_window] or full
    if not full:
        raise ValueError(f"{said.name('attention.sliding_window_pattern')} has windows everywhere")
    n_kv_heads = said.per_layer("attention.head_count_kv", n_layers)
    if not n_kv_heads:
        raise ValueError(f"{said.name('attention.head_count_kv')} is missing")
    own = {
        "head_dim": said.needed("attention.key_length"),
        "num_key_value_heads": n_kv_heads[full[0]],
    }
    return {
        **_per_layer(said),
        **window_layers(said, config),
        **_gemma4_experts(said),
        "final_logit_softcapping": said.number("final_logit_softcapping"),
        "head_dim": said.integer("attention.key_length_swa") or own["head_dim"],
        "num_key_value_heads": n_kv_heads[sliding[0]],
        "per_layer_config": {str(i): own for i in full},
        "attention_k_eq_v": not said.has(f"blk.{full[0]}.attn_v.weight"),
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) == 2 * min(sizes),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_share(said),
                "rope_theta": base,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        },
    }


def _gemma4_experts(said: Metadata) -> Config:
    if not said.integer("expert_count"):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": said.needed("expert_count"),
        "top_k_experts": said.needed("expert_used_count"),
        "moe_intermediate_size": said.needed("expert_feed_forward_length"),
    }


def _rotated_share(said: Metadata) -> float:
    """Returns the fraction of a head's elements that are rotated in layers without a window.

    The file has a divisor for the frequency of each element. The divisor of an element that is not
    rotated is very large.

    Raises:
        ValueError: the divisor of an element that is rotated is not 1.
    """
    if not said.has("rope_freqs.weight"):
        return 1.0
    divisors = said.header.floats("rope_freqs.weight")
    n_rotated = sum(each < _NOT_ROTATED for each in divisors)
    if any(each != 1 for each in divisors[:n_rotated]):
        raise ValueError(f"{said.header.path}: rope_freqs.weight divides frequencies")
    return n_rotated / max(1, len(divisors))


_GEMMA3N_OTHERS = frozenset((
    "activation_sparsity_scale", "attention.sliding_window_pattern", "feed_forward_length",
    "final_logit_softcapping", "rope.freq_base_swa",
))  # fmt: skip
GEMMA3N = Architecture(
    family="Gemma3nForCausalLM",
    tensors={**_SHARED, **_ALTUP},
    keys={**_KEYS, "altup.num_inputs": "altup_num_inputs", "altup.active_idx": "altup_active_idx"},
    renamed={"feed_forward_length": ""},
    others=_GEMMA3N_OTHERS,
    constants=_CONSTANTS,
    more=_gemma3n,
)
_GEMMA4_OTHERS = frozenset((
    "attention.head_count_kv", "attention.key_length", "attention.key_length_swa",
    "attention.sliding_window_pattern", "attention.value_length_swa", "expert_count",
    "expert_feed_forward_length", "expert_used_count", "feed_forward_length",
    "final_logit_softcapping", "rope.dimension_count_swa", "rope.freq_base_swa",
))  # fmt: skip
GEMMA4 = Architecture(
    family="Gemma4ForCausalLM",
    tensors={**_SHARED, **_EXPERTS},
    keys=_KEYS,
    renamed={
        "feed_forward_length": "",
        "attention.head_count_kv": "",
        "attention.key_length": "",
    },
    others=_GEMMA4_OTHERS,
    constants=_CONSTANTS,
    more=_gemma4,
    has_rope=False,
)
