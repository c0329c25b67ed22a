"""Computes the metadata that llama.cpp's converter writes for a `config.json`."""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

Values = dict[str, Any]
Json = Mapping[str, Any]

ARCHITECTURES = {
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command-r",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "GlmForCausalLM": "chatglm",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}

# Keys in `config.json`, and in files of any architecture.
SHARED = {
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
WITH_WINDOWS = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss", "cohere2", "exaone4", "phi3")
FLOATS = (
    "_epsilon", "_factor", "_scale", "attention.scale", "base", "base_swa", "beta_fast",
    "beta_slow", "multiplier", "scaling.factor", "softcapping",
)  # fmt: skip
ROPE_KINDS = ("linear", "yarn", "longrope")


def said(config: Json, architecture: str) -> Values:
    """Returns the metadata of a configuration for an architecture of llama.cpp."""
    values: Values = {
        key: config[name] for name, key in SHARED.items() if config.get(name) is not None
    }
    values["block_count"] = config.get("num_hidden_layers", config.get("n_layer"))
    if "attention.key_length" in values:
        values["attention.value_length"] = values["attention.key_length"]
    if architecture in WITH_WINDOWS and config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    values |= rotary(config)
    if architecture in OWN:
        values |= OWN[architecture](config, values)
    return {
        f"{architecture}.{key}": float(value) if is_float(key, value) else value
        for key, value in values.items()
        if value is not None
    }


def is_float(key: str, value: Any) -> bool:
    """Returns whether a value is stored as a float even if it is whole in `config.json`."""
    return not isinstance(value, (bool, list, str)) and key.endswith(FLOATS)


def rotary(config: Json) -> Values:
    rope: Values = config.get("rope_parameters") or {}
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    values: Values = {
        "rope.freq_base": full.get("rope_theta"),
        "rope.freq_base_swa": local.get("rope_theta"),
    }
    if full.get("rope_type") in ROPE_KINDS:
        values["rope.scaling.type"] = full["rope_type"]
    if full.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.factor"] = full["factor"]
    if full.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": full.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": full.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": full.get("beta_slow"),
        }
    return values


def pattern(config: Json, values: Values) -> Values:
    kinds = config.get("layer_types")
    if kinds is None or not config.get("sliding_window"):
        return {}
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
    }


def head_dim(config: Json) -> int:
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def whole_heads(config: Json, values: Values) -> Values:
    return {"rope.dimension_count": head_dim(config)}


def chatglm(config: Json, values: Values) -> Values:
    return share_of_heads(config, values) | {
        "attention.key_length": None,
        "attention.value_length": None,
    }


def no_rope(config: Json, values: Values) -> Values:
    return {"rope.freq_base": None}


def share_of_heads(config: Json, values: Values) -> Values:
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.5)
    return {"rope.dimension_count": int(head_dim(config) * share)}


def granite(config: Json, values: Values) -> Values:
    return {
        "rope.dimension_count": head_dim(config),
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def mistral3(config: Json, values: Values) -> Values:
    rope = config["rope_parameters"]
    return {
        "rope.dimension_count": head_dim(config),
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def cohere(config: Json, values: Values) -> Values:
    return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}


def cohere2(config: Json, values: Values) -> Values:
    return cohere(config, values) | {"rope.dimension_count": head_dim(config)}


def gpt_oss(config: Json, values: Values) -> Values:
    return {"expert_feed_forward_length": config["intermediate_size"]}


def qwen2moe(config: Json, values: Values) -> Values:
    return {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


def hybrid(config: Json, values: Values) -> Values:
    head = head_dim(config) * config["rope_parameters"].get("partial_rotary_factor", 0.25)
    n_values = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": n_values,
        "ssm.inner_size": config["linear_value_head_dim"] * n_values,
        "attention.recurrent_layers": [
            kind == "linear_attention" for kind in config["layer_types"]
        ],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(head),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def qwen35(config: Json, values: Values) -> Values:
    return hybrid(config, values) | {"rope.dimension_sections": [11, 11, 10, 0]}


def shares_of(config: Json) -> list[float]:
    """Returns, for each layer, the share of the gates that the layer sets to zero."""
    shares: list[float] = config["activation_sparsity_pattern"]
    return shares


def gemma3n(config: Json, values: Values) -> Values:
    scales = [NormalDist().inv_cdf(x) if x else -math.inf for x in shares_of(config)]
    return pattern(config, values) | {
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "activation_sparsity_scale": scales,
    }


def gemma4(config: Json, values: Values) -> Values:
    own: Values = next(iter((config.get("per_layer_config") or {}).values()), {})
    full_dim = own.get("head_dim", config.get("global_head_dim"))
    full_heads = own.get("num_key_value_heads", config.get("num_global_key_value_heads"))
    n_layers, n_shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    size = config["intermediate_size"]
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    found = pattern(config, values) | {
        "attention.shared_kv_layers": n_shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": config["head_dim"],
    }
    if config.get("use_double_wide_mlp"):
        found["feed_forward_length"] = [
            size * (1 if i < n_layers - n_shared else 2) for i in range(n_layers)
        ]
    if full_heads is not None:
        local = config["num_key_value_heads"]
        found["attention.head_count_kv"] = [local if each else full_heads for each in windows]
    return found


def deepseek2(config: Json, values: Values) -> Values:
    n_turned, scale = config["qk_rope_head_dim"], config["rope_parameters"].get("mscale_all_dim")
    is_sigmoid = "DeepseekV2" not in config["architectures"][0]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + n_turned,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": config["qk_nope_head_dim"] + n_turned,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "leading_dense_block_count": config.get("first_k_dense_replace")
        or (config.get("mlp_layer_types") or []).count("dense"),
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": (config.get("norm_topk_prob") and is_sigmoid) or None,
        "expert_gating_func": 2 if config.get("scoring_func") == "sigmoid" else None,
        "rope.dimension_count": n_turned,
        "rope.scaling.yarn_log_multiplier": None if scale is None else 0.1 * scale,
    }


def phi3(config: Json, values: Values) -> Values:
    rope = config["rope_parameters"]
    original = rope.get(
        "original_max_position_embeddings", config.get("original_max_position_embeddings")
    )
    scale = config["max_position_embeddings"] / original
    factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    size = config["hidden_size"] // config["num_attention_heads"]
    return {
        "attention.sliding_window": config.get("sliding_window") or 0,
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.type": None,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": factor if "long_factor" in rope else None,
    }


def gpt2(config: Json, values: Values) -> Values:
    return {"feed_forward_length": config.get("n_inner") or 4 * config["n_embd"]}


# What converters write for one architecture besides, from the configuration and the rest.
OWN: dict[str, Callable[[Json, Values], Values]] = {
    "chatglm": chatglm,
    "cohere2": cohere2,
    "command-r": cohere,
    "deepseek2": deepseek2,
    "exaone4": pattern,
    "gemma": no_rope,
    "gemma2": no_rope,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "glm4": share_of_heads,
    "gpt-oss": gpt_oss,
    "gpt2": gpt2,
    "granite": granite,
    "llama": whole_heads,
    "mistral3": mistral3,
    "olmo2": pattern,
    "phi3": phi3,
    "qwen2moe": qwen2moe,
    "qwen35": qwen35,
    "qwen35moe": qwen35,
    "qwen3next": hybrid,
    "smollm3": whole_heads,
}
