"""A request's numbers are the same bits alone, in any batch, in any chunks, and recomputed.

Requests run alone first, prompt and then token by token, on one thread and one stage. Their tokens
then come again in other batches, chunks, stages and numbers of threads: the logits must be equal,
and so the tokens that are sampled from them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from kernels.native import groups, heads, linear, operations
from kernels.native.library import open_library, runnable
from kernels.native.operations import native_ops
from kernels.weights.linear import Quantization
from services.common.sampling import SamplingParams
from tests.checkpoints import write_family_checkpoint
from tests.kernels.rows import threads
from tests.worker.pipeline import GREEDY, Pipeline, Span

pytestmark = pytest.mark.skipif(not runnable(), reason="the native library is not built")

VOCAB_SIZE = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "eos_token_id": 2,
}
GPT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "bos_token_id": 2, "eos_token_id": 2}
# The last layer attends to keys and values of the one before.
GEMMA: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "head_dim": 16,
    "sliding_window": 50,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 18,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=64),
    "llama with sizes that fit nothing": LlamaConfig(
        **{**SIZES, "hidden_size": 52, "intermediate_size": 75}, mlp_bias=True, head_dim=18
    ),
    "mistral": MistralConfig(**SIZES, head_dim=64, sliding_window=37),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=70, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
    "qwen3-moe": Qwen3MoeConfig(
        **{**SIZES, "head_dim": 16},
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=36,
    ),
    "qwen3-next": Qwen3NextConfig(
        **SIZES,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=33,
        linear_value_head_dim=40,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=36,
    ),
    "qwen3.5": Qwen3_5TextConfig(
        **SIZES,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=3,
    ),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=50),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=50),
    "gemma3n": Gemma3nTextConfig(
        **GEMMA, laurel_rank=10, activation_sparsity_pattern=[0.8, 0.0, 0.6, 0.0]
    ),
    "gemma4": Gemma4TextConfig(**{**GEMMA, "global_head_dim": 32}, use_double_wide_mlp=True),
    "gemma4 with experts": Gemma4TextConfig(
        **{**SIZES, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
        attention_k_eq_v=True,
        sliding_window=50,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=40,
    ),
    "phi3": Phi3Config(
        **SIZES,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75},
    ),
    "smollm3": SmolLM3Config(**SIZES, pad_token_id=None, no_rope_layer_interval=2),
    "granite": GraniteConfig(
        **SIZES, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.5
    ),
    "cohere2": Cohere2Config(
        **SIZES, sliding_window=37, layer_types=["sliding_attention", "full_attention"]
    ),
    "glm4": Glm4Config(**SIZES, head_dim=16, pad_token_id=None),
    "ministral3": Ministral3Config(
        **SIZES,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "olmo3": Olmo3Config(
        **SIZES, sliding_window=37, layer_types=["sliding_attention", "full_attention"]
    ),
    "deepseek_v2": DeepseekV2Config(
        **LATENT, n_routed_experts=8, num_experts_per_tok=3, q_lora_rank=None
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        q_lora_rank=40,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "gpt2": GPT2Config(**GPT, n_embd=52, n_layer=2, n_head=4, initializer_range=0.25),
    "olmoe": OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2),
    "exaone4": Exaone4Config(
        **SIZES, sliding_window=37, layer_types=["sliding_attention", "full_attention"]
    ),
    "opt": OPTConfig(
        **GPT,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
    ),
}
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=3),
    replace(GREEDY, frequency_penalty=0.5),
]
N_GENERATED = 6
PROMPTS = [random.Random(n).choices(range(VOCAB_SIZE), k=n) for n in (3, 40, 150, 270, 20)]


@dataclass(frozen=True)
class Alone:
    """Returns the tokens of a request that has all stages to itself."""

    n_prompt: int
    sampling: SamplingParams
    tokens: Sequence[int]  # of the prompt, and generated
    logits: Sequence[Tensor]  # from which each generated token was sampled

    def check(self, n_tokens: int, sampled: int, logits: Tensor) -> None:
        """Holds what was sampled after `n_tokens` to what was sampled alone."""
        assert torch.equal(logits, self.logits[n_tokens - self.n_prompt]), n_tokens
        assert sampled == self.tokens[n_tokens], n_tokens


def run_alone(pipeline: Pipeline, prompt: Sequence[int], sampling: SamplingParams) -> Alone:
    pipeline.admit(0, len(prompt), sampling)
    tokens, logits, given = list(prompt), [], list(prompt)
    for _ in range(N_GENERATED):
        given, (of_token,) = pipeline.run([Span(0, given)])
        tokens += given
        logits.append(of_token)
    pipeline.release(0)
    return Alone(len(prompt), sampling, tokens, logits)


def check_batches(pipeline: Pipeline, requests: Sequence[Alone], chance: random.Random) -> None:
    """All requests beside each other, prompts in chunks, in another order in each iteration."""
    waiting = dict(enumerate(requests))
    n_run = dict.fromkeys(waiting, 0)
    for row, request in waiting.items():
        pipeline.admit(row, request.n_prompt, request.sampling)
    while waiting:
        spans = []
        for row in chance.sample(list(waiting), chance.randint(1, len(waiting))):
            begin, n_left = n_run[row], waiting[row].n_prompt - n_run[row]
            n = min(n_left, chance.choice([1, 5, 17, 64, n_left])) if n_left > 0 else 1
            n_run[row] += n
            is_sampled = n_run[row] >= waiting[row].n_prompt
            spans.append(Span(row, waiting[row].tokens[begin : begin + n], sample=is_sampled))
        sampled, logits = pipeline.run(spans)
        rows = [span.row for span in spans if span.sample]
        for row, token, of_token in zip(rows, sampled, logits, strict=True):
            waiting[row].check(n_run[row], token, of_token)
            if n_run[row] + 1 == len(waiting[row].tokens):
                del waiting[row]
                pipeline.release(row)


def check_recomputed(pipeline: Pipeline, requests: Sequence[Alone], chance: random.Random) -> None:
    """Prompt and some of the tokens as one prefill, at once or in two, beside another request."""
    for request in requests:
        n = request.n_prompt + chance.randrange(N_GENERATED)
        n_before = chance.choice([0, chance.randrange(n)])
        other = chance.choice(requests)
        pipeline.admit(7, request.n_prompt, request.sampling)
        pipeline.admit(2, other.n_prompt, other.sampling)
        if n_before:
            pipeline.run([Span(7, request.tokens[:n_before], sample=False)])
        spans = [Span(2, other.tokens[: other.n_prompt]), Span(7, request.tokens[n_before:n])]
        sampled, logits = pipeline.run(spans)
        other.check(other.n_prompt, sampled[0], logits[0])
        request.check(n, sampled[1], logits[1])
        pipeline.release(7)
        pipeline.release(2)


def check(
    directory: Path,
    *,
    dtype: str,
    quantization: Quantization = "none",
    n_stages: int = 2,
    tp_size: int = 1,
    seed: int = 0,
) -> None:
    def pipeline(n_stages: int) -> Pipeline:
        return Pipeline(
            directory,
            n_stages=n_stages,
            tp_size=tp_size,
            dtype=dtype,
            quantization=quantization,
            n_kv_blocks=80,
            block_size=16,
        )

    chance = random.Random(seed)
    with threads(1):
        first = pipeline(1)
        requests = [
            run_alone(first, prompt, sampling)
            for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
        ]
    assert len({tuple(request.tokens[-N_GENERATED:]) for request in requests}) == len(requests)
    other = pipeline(n_stages)
    for n_threads in (2, 3):
        with threads(n_threads):
            check_batches(other, requests, chance)
            check_recomputed(other, requests, chance)


# One family of each kind of layers; the others, and float32, are tested where there is time.
KINDS = ("llama", "gemma3n", "qwen3-moe", "deepseek_v3", "qwen3.5")
OFTEN = {(kind, "bfloat16") for kind in KINDS}
QUANTISED = [
    pytest.param(
        family,
        quantization,
        dtype,
        marks=()
        if (family, quantization, dtype)
        in {("llama", "int8", "bfloat16"), ("qwen3.5", "int4", "bfloat16")}
        else pytest.mark.thorough,
    )
    for family in ("llama", "gpt2", "qwen3-moe", "qwen3.5")
    for quantization in ("int8", "int4")
    for dtype in ("bfloat16", "float32")
]
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in OFTEN else pytest.mark.thorough)
    for name in FAMILIES
    for dtype in ("bfloat16", "float32")
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_company_changes_nothing(tmp_path: Path, family: str, dtype: str) -> None:
    check(write_family_checkpoint(tmp_path, FAMILIES[family]), dtype=dtype)


@pytest.mark.parametrize(("family", "quantization", "dtype"), QUANTISED)
def test_company_changes_nothing_with_quantised_weights(
    tmp_path: Path, family: str, quantization: Quantization, dtype: str
) -> None:
    directory = write_family_checkpoint(tmp_path, FAMILIES[family])
    check(directory, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        *(pytest.param(family, marks=pytest.mark.thorough) for family in ("llama", "qwen3-next")),
    ],
)
def test_company_changes_nothing_where_ranks_share_layers(tmp_path: Path, family: str) -> None:
    check(write_family_checkpoint(tmp_path, FAMILIES[family]), dtype="bfloat16", tp_size=2)


@pytest.mark.thorough
@pytest.mark.parametrize("build", runnable()[1:])
@pytest.mark.parametrize(("seed", "family"), list(enumerate(FAMILIES)))
def test_company_changes_nothing_on_any_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, build: str, seed: int
) -> None:
    library, dtype = open_library(build), ("float32", "bfloat16")[seed % 2]
    cached = (
        native_ops,
        groups._functions,
        linear._functions,
        linear._int8_functions,
        heads._functions,
    )
    with monkeypatch.context() as patch:
        for module in (groups, heads, linear, operations):
            patch.setattr(module, "library", lambda: library)
        for each in cached:
            each.cache_clear()
        directory = write_family_checkpoint(tmp_path, FAMILIES[family], seed=seed)
        check(directory, dtype=dtype, n_stages=seed % 2 + 1, seed=seed)
    for each in cached:
        each.cache_clear()
