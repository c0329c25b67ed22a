"""Every family but Llama (test_models has that one) against `transformers`, in small shapes.

Windows are shorter than the sequences, sizes are odd where they can be, and every family has two
shapes at least that differ in what its configuration can say.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from services.worker.models import UnsupportedModel
from services.worker.models.config_file import read_config
from services.worker.models.model_types import ARCHITECTURES
from services.worker.models.registry import FAMILIES
from tests.checkpoints import SMALL, Oracle, edit_config, write_family_checkpoint
from tests.worker.models.test_models import compare_random_schedule
from tests.worker.pipeline import Pipeline, Span, load

# Two heads of K and V at least, so that two ranks can share them.
LLAMA_LIKE = {**SMALL, "num_hidden_layers": 4}
GPT2: dict[str, Any] = {
    "vocab_size": 199,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "initializer_range": 0.25,
}
OPT: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "ffn_dim": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.25,
    "word_embed_proj_dim": 48,
}
WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}

ENCODERS = ("bert", "camembert", "roberta", "xlm-roberta")
"""Types of the families that generate no tokens, which tests/worker/engine/test_encoders.py
compares with the oracle."""


SHAPES: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**LLAMA_LIKE, sliding_window=7, head_dim=8),
    "mistral-no-window": MistralConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6}, sliding_window=None, head_dim=10
    ),
    "qwen2": Qwen2Config(**LLAMA_LIKE),
    "qwen2-windows": Qwen2Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(**LLAMA_LIKE, head_dim=10),
    "qwen3-windows": Qwen3Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=WINDOWS,
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(**GPT2),
    "gpt2-variants": GPT2Config(
        **{**GPT2, "n_head": 2},
        n_inner=74,
        activation_function="relu",
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
    "opt": OPTConfig(**OPT),
    "opt-post-norm": OPTConfig(
        **OPT, do_layer_norm_before=False, activation_function="gelu", tie_word_embeddings=False
    ),
    "opt-no-final-norm": OPTConfig(**OPT, _remove_final_layer_norm=True),
    "gemma": GemmaConfig(**LLAMA_LIKE, head_dim=10),
    "gemma-biases": GemmaConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=8,
        hidden_act="gelu",
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma2": Gemma2Config(**LLAMA_LIKE, head_dim=8, query_pre_attn_scalar=20, sliding_window=7),
    "gemma2-variants": Gemma2Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=10,
        sliding_window=4,
        layer_types=WINDOWS,
        attention_bias=True,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gemma3": Gemma3TextConfig(
        **{**LLAMA_LIKE, "sliding_window_pattern": 3}, head_dim=8, sliding_window=6
    ),
    "gemma3-variants": Gemma3TextConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=10,
        sliding_window=4,
        layer_types=WINDOWS,
        final_logit_softcapping=9.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "mixtral": MixtralConfig(**LLAMA_LIKE, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": MixtralConfig(
        **{**LLAMA_LIKE, "num_hidden_layers": 2},
        num_local_experts=3,
        num_experts_per_tok=3,
        sliding_window=6,
        head_dim=10,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **LLAMA_LIKE,
        moe_intermediate_size=22,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "qwen3_moe-dense-layers": Qwen3MoeConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6, "head_dim": 10},
        moe_intermediate_size=18,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "ministral": MinistralConfig(
        **LLAMA_LIKE, head_dim=8, sliding_window=7, layer_types=WINDOWS, rope_parameters=YARN
    ),
    "ministral-all-windows": MinistralConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=10,
        sliding_window=9,
        tie_word_embeddings=True,
    ),
    "ministral3": Ministral3Config(
        **LLAMA_LIKE, head_dim=8, rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}
    ),
    "ministral3-window": Ministral3Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=10,
        sliding_window=8,
        tie_word_embeddings=True,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 5,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "cohere": CohereConfig(**LLAMA_LIKE, logit_scale=0.3),
    "cohere-biases": CohereConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        attention_bias=True,
        tie_word_embeddings=False,
        layer_norm_eps=0.1,
        logit_scale=1.5,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    ),
    "cohere2": Cohere2Config(**LLAMA_LIKE, logit_scale=0.7, sliding_window=7),
    "cohere2-biases": Cohere2Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        layer_types=WINDOWS,
        sliding_window=9,
        attention_bias=True,
        tie_word_embeddings=False,
        logit_scale=1.0,
    ),
    "granite": GraniteConfig(
        **LLAMA_LIKE,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
    ),
    "granite-biases": GraniteConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "smollm3": SmolLM3Config(**LLAMA_LIKE, pad_token_id=None),
    "smollm3-windows": SmolLM3Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6, "pad_token_id": None},
        no_rope_layers=[0, 1, 1, 0],
        use_sliding_window=True,
        sliding_window=6,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_parameters={**YARN, "truncate": False},
    ),
    "glm": GlmConfig(**LLAMA_LIKE, head_dim=8, pad_token_id=None),
    "glm-whole-heads": GlmConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=10,
        pad_token_id=None,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
    ),
    "glm4": Glm4Config(**LLAMA_LIKE, head_dim=12, pad_token_id=None),
    "glm4-yarn": Glm4Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=10,
        pad_token_id=None,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={**YARN, "partial_rotary_factor": 0.6},
    ),
    "olmo2": Olmo2Config(**LLAMA_LIKE),
    "olmo2-biases": Olmo2Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    ),
    "olmo3": Olmo3Config(**LLAMA_LIKE, sliding_window=7),
    "olmo3-yarn": Olmo3Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        sliding_window=5,
        layer_types=WINDOWS,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "olmoe": OlmoeConfig(**LLAMA_LIKE, num_experts=7, num_experts_per_tok=3, norm_topk_prob=True),
    "olmoe-biases": OlmoeConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        num_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "seed_oss": SeedOssConfig(**LLAMA_LIKE, head_dim=10),
    "seed_oss-biases": SeedOssConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=8,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "ernie4_5": Ernie4_5Config(**LLAMA_LIKE, head_dim=10),
    "ernie4_5-biases": Ernie4_5Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        head_dim=8,
        use_bias=True,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    ),
    "exaone4": Exaone4Config(**LLAMA_LIKE, sliding_window=7, sliding_window_pattern=3),
    "exaone4-no-window": Exaone4Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6, "head_dim": 10},
        sliding_window=None,
        layer_types=["full_attention"] * 4,
        tie_word_embeddings=True,
    ),
    # Longer than their original contexts, which the test's sequences are or are not.
    "phi3": Phi3Config(
        **{**LLAMA_LIKE, "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": None},
        original_max_position_embeddings=2,
        rope_parameters={
            "partial_rotary_factor": 0.75,
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "attention_factor": 1.1,
            "short_factor": [1.0] * 6,
            "long_factor": [1.0, 2.0, 5.0, 9.0, 20.0, 30.0],
        },
    ),
    "phi3-window": Phi3Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6, "pad_token_id": None},
        sliding_window=7,
        tie_word_embeddings=True,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "attention_factor": 1.3,
            "short_factor": [1.0, 1.5, 2.5, 4.0],
            "long_factor": [1.0, 2.0, 5.0, 30.0],
        },
    ),
    "starcoder2": Starcoder2Config(**LLAMA_LIKE, sliding_window=7),
    "starcoder2-variants": Starcoder2Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 6, "hidden_act": "gelu"},
        activation_function="relu",  # which nothing reads
        norm_epsilon=0.1,
        use_bias=False,
        tie_word_embeddings=False,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **LLAMA_LIKE,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=26,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "qwen2_moe-dense-layers": Qwen2MoeConfig(
        **{**LLAMA_LIKE, "num_key_value_heads": 6},
        moe_intermediate_size=18,
        shared_expert_intermediate_size=34,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
}

# Sizes of whole blocks of MXFP4, of which a rank of two has half a one.
GPT_OSS: dict[str, Any] = {
    **LLAMA_LIKE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 8,
    "sliding_window": 7,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
SHAPES |= {
    "gpt_oss": GptOssConfig(**GPT_OSS),
    "gpt_oss-variant": GptOssConfig(
        **{**GPT_OSS, "hidden_size": 50, "intermediate_size": 34, "num_key_value_heads": 6},
        layer_types=WINDOWS,
        attention_bias=False,
        swiglu_alpha=0.9,
        swiglu_limit=1.5,
        tie_word_embeddings=True,
    ),
}

# The last two of eight layers attend to keys and values of the two before, on the same stage.
GEMMA3N: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "sliding_window": 7,
    "layer_types": [*WINDOWS, *["sliding_attention", "full_attention"] * 2],
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": SMALL["vocab_size"],
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.7, *[0.0] * 4],
}
GEMMA4: dict[str, Any] = {**GEMMA3N, "head_dim": 4, "global_head_dim": 8}
del GEMMA4["laurel_rank"], GEMMA4["activation_sparsity_pattern"]
SHAPES |= {
    "gemma3n": Gemma3nTextConfig(**GEMMA3N),
    "gemma3n-variant": Gemma3nTextConfig(
        **{**GEMMA3N, "num_kv_shared_layers": 0, "num_key_value_heads": 6},
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
        attention_bias=True,
        final_logit_softcapping=9.0,
    ),
    "gemma4": Gemma4TextConfig(**GEMMA4, use_double_wide_mlp=True, final_logit_softcapping=9.0),
    "gemma4-experts": Gemma4TextConfig(
        **{
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "num_global_key_value_heads": 6,
        },
        attention_k_eq_v=True,
        attention_bias=True,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=22,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
}

# Every head has keys and values of its own, made of a latent that all share.
LATENT: dict[str, Any] = {
    **LLAMA_LIKE,
    "num_key_value_heads": None,
    "kv_lora_rank": 20,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "moe_intermediate_size": 22,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
SHAPES |= {
    "deepseek_v2": DeepseekV2Config(**LATENT, routed_scaling_factor=1.5),
    "deepseek_v2-groups": DeepseekV2Config(
        **{**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0},
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT,
        n_group=3,
        topk_group=2,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3-variants": DeepseekV3Config(
        **{**LATENT, "q_lora_rank": None, "v_head_dim": 13, "num_experts_per_tok": 2},
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(**{**LATENT, "num_key_value_heads": 6}),
    "glm4_moe_lite-groups": Glm4MoeLiteConfig(
        **{**LATENT, "num_key_value_heads": 6, "q_lora_rank": None},
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.0,
        tie_word_embeddings=True,
        rope_parameters={**YARN, "mscale": 0.5, "mscale_all_dim": 1.0},
    ),
}

# Two key heads at least, and full attention on both of two stages. What a first token reads of its
# own state may be next to nothing: normalised with a smaller epsilon, or after wider weights, the
# oracle's own float32 is 1e-4 from exact.
HYBRID: dict[str, Any] = {
    **LLAMA_LIKE,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-3,
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}
HYBRID_VARIANT: dict[str, Any] = {
    **HYBRID,
    "num_key_value_heads": 6,
    "head_dim": 12,
    # The first of two stages attends to nothing.
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
}
HYBRID_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}
SHAPES |= {
    "qwen3_next": Qwen3NextConfig(**HYBRID, **HYBRID_EXPERTS),
    "qwen3_next-dense-layers": Qwen3NextConfig(
        **HYBRID_VARIANT,
        **{**HYBRID_EXPERTS, "num_experts": 4, "num_experts_per_tok": 2},
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen3_5": Qwen3_5TextConfig(**HYBRID),
    "qwen3_5-variant": Qwen3_5TextConfig(**HYBRID_VARIANT),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**HYBRID, **HYBRID_EXPERTS),
    "qwen3_5_moe-variant": Qwen3_5MoeTextConfig(**HYBRID_VARIANT, **HYBRID_EXPERTS),
}

BASIC = {name: config for name, config in SHAPES.items() if "-" not in name}

# One family of each kind of layers; the others are tested where there is time.
KINDS = {"llama", "gpt2", "mixtral", "gemma3n", "deepseek_v3", "qwen3_next"}
IN_BFLOAT16 = [
    pytest.param(config, id=name, marks=() if name in KINDS else pytest.mark.thorough)
    for name, config in BASIC.items()
]

# Families of each kind of layers are cut both ways, and so is the variant whose first stage attends
# to nothing; the other families are computed whole. Other cuts, and the other variants, are tested
# where there is time.
IN_PARTS = {*KINDS, "qwen3_5-variant"}
IN_ONE = set(BASIC) - IN_PARTS
OFTEN = {*((name, 2, 2) for name in IN_PARTS), *((name, 1, 1) for name in IN_ONE)}
CUTS = [  # config, stages, ranks that share each
    pytest.param(
        config,
        n_stages,
        tp_size,
        id=f"{name}-{n_stages}-{tp_size}",
        marks=() if (name, n_stages, tp_size) in OFTEN else pytest.mark.thorough,
    )
    for name, config in SHAPES.items()
    for n_stages, tp_size in ((1, 1), (2, 2))
]


class TestAgainstTransformers:
    @pytest.mark.parametrize(("config", "n_stages", "tp_size"), CUTS)
    def test_mixed_batches_have_the_oracles_logits_and_tokens(
        self, tmp_path: Path, config: PreTrainedConfig, n_stages: int, tp_size: int
    ) -> None:
        write_family_checkpoint(tmp_path, config)
        pipeline = Pipeline(tmp_path, n_stages=n_stages, tp_size=tp_size)
        compare_random_schedule(pipeline, Oracle(tmp_path), seed=n_stages)

    @pytest.mark.parametrize("config", IN_BFLOAT16)
    def test_bfloat16_is_as_close_to_exact_as_the_oracle_is(
        self, tmp_path: Path, config: PreTrainedConfig
    ) -> None:
        write_family_checkpoint(tmp_path, config, dtype=torch.bfloat16)
        exact_oracle, oracle = (
            Oracle(tmp_path, dtype) for dtype in (torch.float32, torch.bfloat16)
        )
        # Of several texts: in one, a rounding may send an early token to another expert, whose keys
        # and values all later ones then see.
        texts = [random.Random(n).choices(range(SMALL["vocab_size"]), k=60) for n in range(5)]
        pipeline = Pipeline(tmp_path, n_kv_blocks=80, block_size=5)
        for row, tokens in enumerate(texts):
            pipeline.admit(row, len(tokens))
        pipeline.run([Span(row, tokens[:20], sample=False) for row, tokens in enumerate(texts)])
        ours = torch.stack(
            [
                pipeline.run([Span(row, [tokens[n]]) for row, tokens in enumerate(texts)])[1]
                for n in range(20, 60)
            ],
            dim=1,
        )  # [n_texts, n_tokens, vocab_size]
        ratios = []
        for tokens, of_text in zip(texts, ours, strict=True):
            exact = exact_oracle.logits(tokens)[20:]
            ratios.append(error(of_text, exact) / error(oracle.logits(tokens)[20:], exact))
        assert min(ratios) > 0
        assert statistics.median(ratios) < 1.25


def test_stages_that_part_layers_from_the_keys_they_attend_to_are_refused(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, SHAPES["gemma4"])
    load(tmp_path, stage_index=1, n_stages=3)
    with pytest.raises(UnsupportedModel, match=r"num_kv_shared_layers: layer 6 .* n_stages"):
        load(tmp_path, stage_index=2, n_stages=3)


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2-windows"])
def test_a_checkpoint_of_the_model_without_its_head_is_the_same_model(
    tmp_path: Path, family: str
) -> None:
    write_family_checkpoint(tmp_path, SHAPES[family])
    tokens = list(range(5, 30))
    expected = last_logits(tmp_path, tokens)
    path = tmp_path / "model.safetensors"
    save_file({name.partition(".")[2]: tensor for name, tensor in load_file(path).items()}, path)
    assert torch.equal(last_logits(tmp_path, tokens), expected)


def test_every_family_is_known_by_its_model_type() -> None:
    assert {*ARCHITECTURES.values()} == {*FAMILIES}
    of_encoders = {kind: name for kind, name in MODEL_MAPPING_NAMES.items() if kind in ENCODERS}
    expected = {
        kind: of_encoders.get(kind) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        for kind in ARCHITECTURES
    }
    assert expected == ARCHITECTURES
    without_tokens = {name for name in FAMILIES if not FAMILIES[name].config_type.is_causal}
    assert without_tokens == {*of_encoders.values()}


def test_the_model_type_counts_if_the_architecture_names_another_family(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, SHAPES["mistral"])
    edit_config(tmp_path, architectures=["LlamaForCausalLM"])
    tokens = list(range(5, 30))
    expected = Oracle(tmp_path).logits(tokens)[-1:]
    torch.testing.assert_close(last_logits(tmp_path, tokens), expected, rtol=1e-4, atol=2e-4)


def last_logits(directory: Path, tokens: list[int], *, max_model_len: int | None = None) -> Tensor:
    pipeline = Pipeline(directory, max_model_len=max_model_len)
    pipeline.admit(0, len(tokens))
    return pipeline.run([Span(0, tokens)])[1]


def error(logits: Tensor, exact: Tensor) -> float:
    """The error of the typical token: rounding chooses between experts that are nearly equal."""
    return float((logits - exact).pow(2).mean(-1).sqrt().median())


def refuse(directory: Path, named: str, config: PreTrainedConfig, **changes: Any) -> None:
    """Checks that `changes` to a config that is served make it one that is refused."""
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(directory)
    read_config(directory)
    with pytest.raises(UnsupportedModel, match=named):
        read_config(edit_config(directory, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act"),
        ("mistral", {"sliding_window": -1}, "window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "without a window"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"activation_function": "silu"}, "activation_function"),
        ("gpt2", {"n_head": 5}, "num_attention_heads"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("opt", {"enable_bias": False}, "enable_bias"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("opt", {"rope_theta": 100.0}, "rope_theta"),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "llama3"),
        (
            "phi3",
            {
                "rope_parameters": None,
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 3},
            },
            "long_factor has 3 factors for 4 waves",
        ),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
        ("phi3", {"attention_bias": True}, "attention_bias"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere", {"use_parallel_block": False}, "use_parallel_block"),
        ("cohere2", {"head_dim": 20}, "head_dim"),
        ("cohere2", {"sliding_window": None}, "without a window"),
        ("ministral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "queries grow"),
        ("ministral3", {"layer_types": WINDOWS}, "layer_types"),
        ("granite", {"residual_multiplier": -1.0}, "residual_multiplier"),
        ("granite", {"position_embedding_type": "nope"}, "position_embedding_type"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "zero"),
        ("glm", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "partial_rotary_factor"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ("glm4", {"hidden_act": "gelu"}, "hidden_act"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "full_attention"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("qwen3_moe", {"num_experts": 9}, "num_experts"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("starcoder2", {"hidden_act": "silu"}, "hidden_act"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type"),
        ("qwen2_moe", {"num_experts_per_tok": 8}, "num_experts_per_tok"),
        ("olmoe", {"num_experts_per_tok": 8}, "num_experts_per_tok"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("seed_oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("ernie4_5", {"moe_num_experts": 64}, "moe_num_experts"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "LLLG"),
        ("exaone4", {"attention_bias": True}, "attention_bias"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen2_moe", {"n_group": 4}, "n_group"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma", {"sliding_window": 512, "layer_types": ["sliding_attention"] * 4}, "sliding"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("gemma3", {"rope_parameters": {"full_attention": {}}}, "sliding_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"vision_config": {"hidden_size": 8}}, "vision_config"),
        ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx"),
        ("gemma3n", {"intermediate_size": [72]}, "intermediate_size has 1"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 8}, "activation_sparsity_pattern"),
        ("gemma3n", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ("gemma3n", {"num_kv_shared_layers": 8}, "num_kv_shared_layers"),
        ("gemma4", {"num_kv_shared_layers": 7}, "num_kv_shared_layers"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"vocab_size_per_layer_input": 198}, "vocab_size_per_layer_input"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": None, "global_head_dim": 9}, "head_dim"),
        ("gemma4", {"num_experts": 4, "enable_moe_block": True}, "without num_experts"),
        ("gemma4-experts", {"top_k_experts": 6}, "top_k_experts"),
        ("gpt_oss", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("gpt_oss", {"quantization": {"group_size": 32, "bits": 4}}, "MLX's files .* GGUF"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "linear"}}, "contradict"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v2", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v2", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("deepseek_v2", {"head_dim": 16}, "head_dim"),
        ("deepseek_v2", {"qk_head_dim": 17}, "qk_head_dim"),
        ("deepseek_v2", {"num_experts_per_tok": 10}, "num_experts_per_tok"),
        ("deepseek_v2-groups", {"num_experts_per_tok": 7}, "6 experts of the groups"),
        ("deepseek_v2-groups", {"topk_group": 4}, "topk_group"),
        (
            "deepseek_v2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim",
        ),
        ("deepseek_v3", {"n_group": 4}, "n_group"),
        ("deepseek_v3", {"n_group": 9}, "n_group"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["linear"] * 4}, "linear"),
        ("qwen3_next", {"num_experts_per_tok": 8}, "num_experts_per_tok"),
        ("qwen3_next", {"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "no layer of full_attention"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_next", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ("qwen3_5_moe", {"num_experts": None, "num_experts_per_tok": 300}, "num_experts"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"rope_parameters": {"rope_type": "axial", "factor": 4.0}}, "axial"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_family_does_not_compute_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    refuse(tmp_path, named, SHAPES[family], **changes)
