"""Configurations as they are found in the wild, older than `transformers` of today, are understood.

Each is a well-known checkpoint's `config.json`, without what every family ignores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine.recurrent_state import state_bytes
from services.worker.models import ModelConfig, UnsupportedModel
from services.worker.models.config import KVSizes
from services.worker.models.config_file import read_config
from services.worker.models.families.deepseek_v2 import DeepseekV2Config
from services.worker.models.families.deepseek_v3 import DeepseekV3Config
from services.worker.models.families.gemma3 import Gemma3Config
from services.worker.models.families.gemma3n import Gemma3nConfig
from services.worker.models.families.gemma4 import Experts, Gemma4Config
from services.worker.models.families.gpt_oss import GptOssConfig
from services.worker.models.families.ministral3 import Ministral3Config
from services.worker.models.families.olmo3 import Olmo3Config
from services.worker.models.families.phi3 import Phi3Config
from services.worker.models.families.qwen3_next import HybridConfig
from services.worker.models.rope import attention_scale
from services.worker.models.rotary_config import RotaryConfig

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

MISTRAL_7B = COMMON | {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MIXTRAL_8X7B = MISTRAL_7B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN2_7B = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = QWEN2_7B | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
GPT2_SMALL: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
OPT_125M: dict[str, Any] = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
GEMMA2_9B = COMMON | {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
GEMMA3_1B = {key: value for key, value in GEMMA2_9B.items() if key != "hidden_act"} | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA3N_E2B: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": {"hidden_size": 1536},
    "audio_soft_tokens_per_image": 188,
    "audio_token_id": 262273,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 262272,
    "eoi_token_id": 262144,
    "eos_token_id": [1, 106],
    "image_token_id": 262145,
    "model_type": "gemma3n",
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 4,
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [8192] * 30,
        "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
        "max_position_embeddings": 32768,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 10,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 2048},
    "vision_soft_tokens_per_image": 256,
}
GEMMA4_26B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "model_type": "gemma4",
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "video_token_id": 258884,
    "vision_config": {"hidden_size": 1152},
    "vision_soft_tokens_per_image": 280,
}
STARCODER2_3B: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}
QWEN3_NEXT_80B = {
    **{key: value for key, value in QWEN3_30B_A3B.items() if key != "max_window_layers"},
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 4,
    "head_dim": 256,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
}
QWEN35_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
}
QWEN35_35B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": QWEN35_TEXT,
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5_moe"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
QWEN15_MOE = QWEN2_7B | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
}

PHI3_MINI = COMMON | {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI4_MINI = PHI3_MINI | {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 200064,
}
OLMO2_7B = COMMON | {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
OLMO3_7B = OLMO2_7B | {
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
}
SMOLLM3_3B = COMMON | {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GRANITE3_2B = COMMON | {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 49155,
}
GLM4_9B = COMMON | {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
COMMAND_R7B = COMMON | {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "use_qk_norm": False,
    "vocab_size": 256000,
}
COMMAND_R = COMMON | {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "pretraining_tp": 1,
    "rope_theta": 8000000.0,
    "use_qk_norm": False,
    "vocab_size": 256000,
}
MINISTRAL3_8B = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 1024},
    "vision_feature_layer": -1,
}

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}

PAPER = Path(__file__).parents[3] / "models" / "configs"

YARN_40 = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V2_LITE = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN_40 | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": YARN_40,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
GLM_47_FLASH = COMMON | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


@pytest.mark.parametrize(
    ("config", "head_dim", "windows"),
    [
        (MISTRAL_7B, 128, [4096] * 32),
        ({key: MISTRAL_7B[key] for key in MISTRAL_7B if key != "sliding_window"}, 128, [4096] * 32),
        (MISTRAL_7B | {"sliding_window": None}, 128, [None] * 32),
        (MIXTRAL_8X7B, 128, [None] * 32),
        (QWEN2_7B, 128, [None] * 28),
        (
            QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 21},
            128,
            [None] * 21 + [131072] * 7,
        ),
        (QWEN3_8B, 128, [None] * 36),
        (QWEN3_30B_A3B, 128, [None] * 48),
        (GPT2_SMALL, 64, [None] * 12),
        (OPT_125M, 64, [None] * 12),
        (GEMMA2_9B, 256, [4096, None] * 21),
        (GEMMA3_1B, 256, [*([512] * 5 + [None]) * 4, 512, 512]),
        (GEMMA3_4B, 256, [*([1024] * 5 + [None]) * 5, *[1024] * 4]),
        (GEMMA3N_E2B, 256, ([512] * 4 + [None]) * 6),
        (GEMMA4_26B, 256, ([1024] * 5 + [None]) * 5),
        (STARCODER2_3B, 128, [4096] * 30),
        (QWEN3_NEXT_80B, 256, [None] * 48),
        (QWEN35_35B_A3B, 256, [None] * 40),
        (QWEN15_MOE, 128, [None] * 24),
        (PHI3_MINI, 96, [2047] * 32),
        (PHI4_MINI, 128, [262144] * 32),
        (OLMO2_7B, 128, [None] * 32),
        (OLMO3_7B, 128, [4096, 4096, 4096, None] * 8),
        (SMOLLM3_3B, 128, [None] * 36),
        (GRANITE3_2B, 64, [None] * 40),
        (GLM4_9B, 128, [None] * 40),
        (COMMAND_R7B, 128, [4096, 4096, 4096, None] * 8),
        (COMMAND_R, 128, [None] * 40),
        (MINISTRAL3_8B, 128, [None] * 34),
        (GPT_OSS_20B, 64, [128, None] * 12),
        (DEEPSEEK_V2_LITE, 64, [None] * 27),
        (DEEPSEEK_V3, 64, [None] * 61),
        (GLM_47_FLASH, 64, [None] * 47),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_well_known_configurations_are_read(
    tmp_path: Path, config: dict[str, Any], head_dim: int, windows: list[int | None]
) -> None:
    ours = read(tmp_path, config)
    assert ours.head_dim == head_dim
    assert list(ours.layer_windows) == windows
    # Families whose files leave this out tie by default.
    assert ours.tie_word_embeddings == ("tie_word_embeddings" not in config)


def test_gemma3_turns_its_two_kinds_of_layers_differently(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_1B)
    assert isinstance(config, Gemma3Config)
    assert (config.rope.rope_theta, config.sliding_rope.rope_theta) == (1e6, 1e4)


def test_the_last_layers_of_gemma3n_store_nothing(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3N_E2B)
    assert isinstance(config, Gemma3nConfig)
    assert list(config.kv_sources) == [*range(20), *[18, 18, 18, 18, 19] * 2]
    assert [sizes.n_heads for sizes in config.layer_kv] == [2] * 20 + [0] * 10
    said = {"activation_sparsity_pattern", "layer_types", "final_logit_softcapping"}
    text = {key: value for key, value in GEMMA3N_E2B["text_config"].items() if key not in said}
    assert read(tmp_path, GEMMA3N_E2B | {"text_config": text}) == config


def test_full_layers_of_gemma4_have_heads_of_their_own(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA4_26B)
    assert isinstance(config, Gemma4Config)
    sliding, full = config.layer_kv[4:6]
    assert sliding == KVSizes(8, 256, 256)
    assert full == KVSizes(2, 512, 512)
    assert (config.full.rope.rope_type, config.sliding.rope.rope_type) == (
        "proportional",
        "default",
    )
    assert config.experts == Experts(128, 8, 704)
    # Later files say it layer by layer.
    own = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    said = {"global_head_dim", "num_global_key_value_heads", "layer_types", "rope_parameters"}
    text = {key: value for key, value in GEMMA4_26B["text_config"].items() if key not in said}
    text["per_layer_config"] = own
    assert read(tmp_path, GEMMA4_26B | {"text_config": text}) == config


def test_what_was_stretched_turns_as_it_was_trained(tmp_path: Path) -> None:
    phi, olmo, ministral = (
        read(tmp_path, config) for config in (PHI4_MINI, OLMO3_7B, MINISTRAL3_8B)
    )
    assert isinstance(phi, Phi3Config)
    assert (phi.rotary_dim, phi.rope.factor) == (96, 32.0)
    assert isinstance(olmo, Olmo3Config)
    assert (olmo.rope.rope_type, olmo.sliding_rope.rope_type) == ("yarn", "default")
    assert isinstance(ministral, Ministral3Config)
    assert (ministral.query_growth, ministral.growth_length) == (0.1, 16384)
    assert attention_scale(ministral.rope) == 1.0


def test_gpt_oss_has_experts_in_mxfp4_and_turns_by_yarn(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS_20B)
    assert isinstance(config, GptOssConfig)
    assert config.packed_layers == tuple(range(24))
    assert (config.rope.rope_type, config.rope.rope_theta) == ("yarn", 15e4)
    assert (config.rope.factor, config.rope.truncate) == (32, False)
    assert config.resolve_dtype("auto") == torch.bfloat16
    # What the file says is what its absence means.
    said = {"rope_scaling", "rope_theta", "layer_types", "sliding_window", "head_dim"}
    kept = {key: value for key, value in GPT_OSS_20B.items() if key not in said}
    assert read(tmp_path, kept) == config


def test_deepseek_v3_stores_latents_and_has_experts_in_groups(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V3)
    assert isinstance(config, DeepseekV3Config)
    assert set(config.layer_kv) == {KVSizes(1, 576, 0)}
    assert (config.n_groups, config.n_chosen_groups, config.n_best) == (8, 4, 2)
    assert config.are_sparse == (False,) * 3 + (True,) * 58
    assert attention_scale(config.rope) == 1.0
    assert config.score_scale == pytest.approx(192**-0.5 * 1.36888794541**2)
    assert config.weight_format is not None
    # What the file says is what its absence means.
    said = {"n_routed_experts", "n_group", "topk_group", "q_lora_rank", "qk_rope_head_dim",
            "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "first_k_dense_replace",
            "norm_topk_prob", "routed_scaling_factor", "topk_method"}  # fmt: skip
    kept = {key: value for key, value in DEEPSEEK_V3.items() if key not in said}
    assert read(tmp_path, kept) == config


def test_deepseek_v2_lite_makes_queries_of_no_latents(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V2_LITE)
    assert isinstance(config, DeepseekV2Config)
    assert (config.query_rank, config.n_groups) == (None, 1)
    assert config.score_scale == pytest.approx(192**-0.5 * 1.26080377741**2)
    without = {key: value for key, value in DEEPSEEK_V2_LITE.items() if key != "q_lora_rank"}
    assert read(tmp_path, without).query_rank == 1536  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "n_linear", "n_state_mib"), [(QWEN3_NEXT_80B, 36, 73.7), (QWEN35_35B_A3B, 30, 61.4)]
)
def test_hybrids_keep_a_state_of_each_request_in_three_layers_of_four(
    tmp_path: Path, config: dict[str, Any], n_linear: int, n_state_mib: float
) -> None:
    ours = read(tmp_path, config)
    kinds = [state is not None for state in ours.layer_states]
    assert kinds == [True, True, True, False] * (ours.n_layers // 4)
    assert [sizes.n_heads == 0 for sizes in ours.layer_kv] == kinds
    assert sum(kinds) == n_linear
    layers = range(ours.n_layers)
    n_bytes = state_bytes(ours, layers, dtype=torch.bfloat16, tp_size=1)
    assert n_bytes / 2**20 == pytest.approx(n_state_mib, rel=0.001)
    assert isinstance(ours, HybridConfig)
    assert (ours.rotary_dim, ours.rope.rope_theta) == (64, 1e7)


def test_opt_350m_is_refused_for_its_projected_embeddings(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"word_embed_proj_dim \(512\)"):
        read(tmp_path, OPT_125M | {"hidden_size": 1024, "word_embed_proj_dim": 512})


@pytest.mark.parametrize(
    ("name", "n_billions"),
    [
        ("orca-125m", 0.125),
        ("orca-1.3b", 1.3),
        ("orca-13b", 13),
        ("orca-101b", 101),
        ("orca-175b", 175),
        ("orca-341b", 341),
    ],
)
def test_the_papers_models_have_as_many_parameters_as_it_says(name: str, n_billions: float) -> None:
    config = read_config(PAPER / name)
    n_of_layers = 12 * config.n_layers * config.hidden_size**2
    n_of_tables = (config.vocab_size + config.max_position_embeddings) * config.hidden_size
    assert (n_of_layers + n_of_tables) / 1e9 == pytest.approx(n_billions, rel=0.02)


def test_every_shipped_shape_is_served() -> None:
    names = sorted(path.parent.name for path in PAPER.glob("*/config.json"))
    assert len(names) == 7
    assert {read_config(PAPER / name).head_dim for name in names} == {64, 128}


def test_command_r_states_its_context_in_a_key_of_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, COMMAND_R).max_position_embeddings == 131072


def test_attn_factor_multiplies_the_scale_of_yarn(tmp_path: Path) -> None:
    """As in vLLM. In the files of DeepSeek-R1-0528-Qwen3-8B it undoes that scale."""
    rope = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "attn_factor": 0.8782488562869419,
    }  # fmt: skip
    config = read(tmp_path, QWEN3_8B | {"max_position_embeddings": 131072, "rope_scaling": rope})
    assert isinstance(config, RotaryConfig)
    assert config.rope.attention_factor == pytest.approx(1)
    wrongs: list[Any] = ["0.5", True, {}]
    for wrong in wrongs:
        with pytest.raises(UnsupportedModel, match="attn_factor"):
            read(tmp_path, QWEN3_8B | {"rope_scaling": {**rope, "attn_factor": wrong}})
