"""Every architecture of GGUF files against `transformers`, in small shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
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
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
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

from services.common.gguf.architectures import ARCHITECTURES
from services.worker.models import CheckpointError, UnsupportedModel
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config_file import read_config
from services.worker.models.gguf_config import read_gguf_header
from services.worker.models.quantised.find import find_stored
from services.worker.models.stored_tensor import GroupedTensor
from services.worker.models.weights import Part
from tests.checkpoints import SMALL, Oracle, write_checkpoint, write_family_checkpoint
from tests.gguf_metadata import ARCHITECTURES as ARCHITECTURE_OF
from tests.ggufs import write_gguf
from tests.worker.models.test_registry import (
    GEMMA3N,
    GEMMA4,
    GPT2,
    GPT_OSS,
    HYBRID,
    HYBRID_EXPERTS,
    LATENT,
    WINDOWS,
    YARN,
)
from tests.worker.pipeline import Pipeline, Span, load

PROMPT = [5, 9, 100, 3, 42, 198, 7, 60, 61, 62, 63, 2, 14, 15, 16, 90]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [1.0, 2.0, 30.0],
    "partial_rotary_factor": 0.75,
}
LAYERS = {**SMALL, "num_hidden_layers": 4}
GEMMA: dict[str, Any] = {**LAYERS, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 22, "num_experts": 5, "num_experts_per_tok": 2}
FULL_AND_LOCAL = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama-biases-tied": LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters={**YARN, "beta_fast": 20.0}),
    "mistral": MistralConfig(**SMALL, head_dim=10, sliding_window=None),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
    "mistral3": Ministral3Config(
        **SMALL,
        head_dim=8,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "granite": GraniteConfig(
        **SMALL,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
    ),
    "smollm3": SmolLM3Config(**LAYERS, pad_token_id=None),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2moe": Qwen2MoeConfig(
        **SMALL, **EXPERTS, shared_expert_intermediate_size=26, norm_topk_prob=False
    ),
    "qwen3": Qwen3Config(**SMALL, head_dim=10),
    "qwen3moe": Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True),
    "qwen3next": Qwen3NextConfig(**HYBRID, **HYBRID_EXPERTS),
    "qwen35": Qwen3_5TextConfig(**HYBRID),
    "qwen35-equal-heads": Qwen3_5TextConfig(**{**HYBRID, "linear_num_value_heads": 2}),
    "qwen35moe": Qwen3_5MoeTextConfig(**HYBRID, **HYBRID_EXPERTS),
    "gemma": GemmaConfig(**SMALL, head_dim=10),
    "gemma2": Gemma2Config(**GEMMA),
    "gemma3": Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 7}),
    "gemma3n": Gemma3nTextConfig(**GEMMA3N),
    "gemma4": Gemma4TextConfig(**GEMMA4, use_double_wide_mlp=True, final_logit_softcapping=9.0),
    "gemma4-experts": Gemma4TextConfig(
        **{
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "num_global_key_value_heads": 6,
        },
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=22,
        rope_parameters=FULL_AND_LOCAL,
    ),
    "gpt-oss": GptOssConfig(**GPT_OSS),
    "phi3": Phi3Config(
        **{**SMALL, "pad_token_id": None},
        original_max_position_embeddings=2,
        rope_parameters=LONGROPE,
    ),
    "phi3-window": Phi3Config(**{**SMALL, "pad_token_id": None}, sliding_window=7),
    "deepseek2": DeepseekV3Config(
        **LATENT,
        n_group=3,
        topk_group=2,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek2-v2": DeepseekV2Config(
        **{**LATENT, "q_lora_rank": None},
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek2-glm": Glm4MoeLiteConfig(**{**LATENT, "num_key_value_heads": 6}),
    "command-r": CohereConfig(**SMALL, logit_scale=0.3),
    "cohere2": Cohere2Config(**LAYERS, logit_scale=0.7, sliding_window=7),
    "chatglm": GlmConfig(**SMALL, head_dim=8, pad_token_id=None, rms_norm_eps=1e-5),
    "glm4": Glm4Config(**SMALL, head_dim=12, pad_token_id=None),
    "olmo2": Olmo2Config(**SMALL),
    "olmo2-windows": Olmo3Config(
        **LAYERS,
        sliding_window=5,
        layer_types=WINDOWS,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "olmoe": OlmoeConfig(**SMALL, num_experts=7, num_experts_per_tok=3, norm_topk_prob=False),
    "seed_oss": SeedOssConfig(**SMALL, head_dim=10),
    "ernie4_5": Ernie4_5Config(**SMALL, head_dim=10),
    "exaone4": Exaone4Config(**LAYERS, sliding_window=7, sliding_window_pattern=3),
    "exaone4-no-window": Exaone4Config(
        **LAYERS, sliding_window=None, layer_types=["full_attention"] * 4
    ),
    "starcoder2": Starcoder2Config(**SMALL, sliding_window=None),
    "gpt2": GPT2Config(**GPT2),
}
# Further models of an architecture are tested where there is time, except those with other tensors.
OFTEN = {*ARCHITECTURES, "mixtral", "gemma4-experts", "deepseek2-v2", "olmo2-windows"}
OF_ALL = [
    pytest.param(config, id=name, marks=() if name in OFTEN else pytest.mark.thorough)
    for name, config in CONFIGS.items()
]
# One architecture of each arrangement of tensors is also cut into stages and ranks.
CUT = ("llama", "qwen3moe", "qwen3next", "qwen35moe", "gemma4-experts", "gpt-oss", "deepseek2")


def check_tokens(file: Path, oracle: Oracle, *, n_stages: int = 1, tp_size: int = 1) -> None:
    """Checks that a prompt and four tokens have the oracle's logits and greedy tokens."""
    pipeline = Pipeline(file, n_stages=n_stages, tp_size=tp_size, dtype="float32")
    pipeline.admit(0, len(PROMPT))
    tokens = list(PROMPT)
    logits: list[torch.Tensor] = []
    for _ in range(4):
        chosen, last = pipeline.run([Span(0, tokens if not logits else tokens[-1:])])
        tokens += chosen
        logits.append(last)
    expected = oracle.logits(tokens)[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=2e-4)
    assert tokens[len(PROMPT) :] == expected.argmax(-1).tolist()


def test_every_architecture_is_tested() -> None:
    # Models that see have the tensors and keys of the same models that do not.
    seeing = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
    assert {name.partition("-")[0] for name in CONFIGS} | seeing >= {
        name.partition("-")[0] for name in ARCHITECTURES
    }
    assert set(ARCHITECTURE_OF.values()) | seeing == set(ARCHITECTURES)


@pytest.mark.parametrize("config", OF_ALL)
def test_an_architecture_has_the_oracles_tokens(tmp_path: Path, config: PreTrainedConfig) -> None:
    write_family_checkpoint(tmp_path, config)
    check_tokens(write_gguf(tmp_path, tmp_path / "model.gguf"), Oracle(tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CUT)
def test_stages_and_ranks_have_the_oracles_tokens(tmp_path: Path, name: str) -> None:
    write_family_checkpoint(tmp_path, CONFIGS[name])
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    check_tokens(file, Oracle(tmp_path), n_stages=2, tp_size=2)


EXPERTS_AT = "model.layers.0.mlp.experts"
IN_BLOCKS: dict[str, PreTrainedConfig] = {
    "qwen3moe": Qwen3MoeConfig(
        **{**SMALL, "hidden_size": 64, "num_attention_heads": 4},
        **{**EXPERTS, "moe_intermediate_size": 64},
        norm_topk_prob=True,
    ),
    "gpt-oss": CONFIGS["gpt-oss"],
    "deepseek2": DeepseekV3Config(
        **{**LATENT, "hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4},
        n_group=3,
        topk_group=2,
    ),
    "qwen35": Qwen3_5TextConfig(
        **{**HYBRID, "hidden_size": 64, "num_attention_heads": 4, "linear_value_head_dim": 16}
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Q8_0") for name in IN_BLOCKS), ("gpt-oss", "MXFP4")]
)
def test_quantised_tensors_mean_what_dequantised_ones_do(
    tmp_path: Path, name: str, kind: str
) -> None:
    write_family_checkpoint(tmp_path, IN_BLOCKS[name])
    number = GGMLQuantizationType[kind]
    logits = []
    for is_dequantised in (False, True):
        file = tmp_path / f"{is_dequantised}.gguf"
        write_gguf(tmp_path, file, kind=number, is_dequantised=is_dequantised)
        pipeline = Pipeline(file, dtype="float32")
        pipeline.admit(0, len(PROMPT))
        logits.append(pipeline.run([Span(0, PROMPT)])[1])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [
        ("gpt-oss", "MXFP4", Part(f"{EXPERTS_AT}.gate_up_proj", (5, 192, 64), is_mxfp4=True)),
        ("gpt-oss", "MXFP4", Part(f"{EXPERTS_AT}.down_proj", (5, 64, 96), is_mxfp4=True)),
        ("qwen3moe", "Q8_0", Part(f"{EXPERTS_AT}.3.up_proj.weight", (64, 64))),
        ("qwen35", "Q8_0", Part("model.layers.0.linear_attn.in_proj_z.weight", (64, 64))),
    ],
    ids=lambda value: None if isinstance(value, str) else value.name.rpartition("layers.0.")[2],
)
def test_rows_in_another_order_stay_packed(
    tmp_path: Path, name: str, kind: str, part: Part
) -> None:
    write_family_checkpoint(tmp_path, IN_BLOCKS[name])
    number = GGMLQuantizationType[kind]
    opened = open_checkpoint(write_gguf(tmp_path, tmp_path / "model.gguf", kind=number))
    stored = find_stored(part, opened.files, None)
    assert isinstance(stored, GroupedTensor)
    assert not list(stored.problems(part.shape))
    assert stored.group_form(part.spans) is not None


def test_a_model_in_several_files_is_named_by_the_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    first = write_gguf(tmp_path, tmp_path / "model.gguf", n_files=3)
    assert first.name == "model-00001-of-00003.gguf"
    check_tokens(first, Oracle(tmp_path))
    second = tmp_path / "model-00002-of-00003.gguf"
    with pytest.raises(UnsupportedModel, match=r"name the first, .*model-00001-of-00003"):
        read_gguf_header(second)
    second.rename(tmp_path / "else.gguf")
    with pytest.raises(UnsupportedModel, match=r"model-00002-of-00003\.gguf"):
        read_gguf_header(first)
    write_gguf(tmp_path, second)
    with pytest.raises(UnsupportedModel, match=r"split\.no and split\.count are \(None, None\)"):
        read_gguf_header(first)


def test_the_name_of_a_file_that_does_not_fit_its_number_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    first = write_gguf(tmp_path, tmp_path / "model.gguf", n_files=2)
    with pytest.raises(UnsupportedModel, match=r"does not end in -00001-of-"):
        read_gguf_header(first.rename(tmp_path / "model.gguf"))


def test_a_file_says_how_positions_are_stretched(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, CONFIGS["phi3"])
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    found, expected = (read_config(each) for each in (file, tmp_path))
    assert found.rope.long_factor == expected.rope.long_factor  # type: ignore[attr-defined]
    metadata = {"phi3.rope.scaling.original_context_length": None}
    file = write_gguf(tmp_path, tmp_path / "other.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModel, match=r"original_context_length is missing"):
        read_config(file)


def test_biases_that_no_family_computes_are_refused(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, Olmo2Config(**SMALL, attention_bias=True))
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"biases that are not computed: blk\.0\.attn"):
        load(file)


def test_tensors_that_the_architecture_does_not_have_are_refused(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, CONFIGS["qwen3"])
    # Qwen3 in a file that calls itself Qwen2 has norms that Qwen2 has not.
    file = write_gguf(tmp_path, tmp_path / "model.gguf", claims="qwen2")
    with pytest.raises(CheckpointError, match=r"not read here: blk\.0\.attn_k_norm\.weight"):
        load(file)


@pytest.mark.parametrize(
    ("name", "key", "value", "named"),
    [
        ("gpt-oss", "rope.freq_base_swa", 7.0, r"freq_base_swa is 7\.0, and freq_base is 500\.0"),
        ("granite", "rope.scaling.finetuned", False, r"no positions are rotated"),
        ("llama", "block_count", 1 << 31, r"block_count means 2147483648 layers"),
        ("qwen3", "nextn_predict_layers", 9, r"block_count means -6 layers"),
        ("qwen3", "attention.layer_norm_rms_epsilon", 1 << 31, "whole number 2147483648, and no"),
        ("cohere2", "logit_scale", 1, "logit_scale is the whole number 1, and no fraction"),
        ("llama", "rope.freq_base", 10_000, "freq_base is the whole number 10000"),
    ],
)
def test_keys_that_would_change_the_tokens_are_refused(
    tmp_path: Path, name: str, key: str, value: Any, named: str
) -> None:
    write_family_checkpoint(tmp_path, CONFIGS[name])
    file = write_gguf(tmp_path, tmp_path / "model.gguf", metadata={f"{name}.{key}": value})
    with pytest.raises(UnsupportedModel, match=named):
        read_config(file)
