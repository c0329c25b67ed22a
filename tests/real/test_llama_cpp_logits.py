"""Logits of GGUF files beside those of llama.cpp, for every architecture in small shapes.

`make test-llama-cpp-logits` builds llama.cpp; without it these tests are skipped. llama.cpp stores
keys and values in float32 here, so it rounds only the function GELU, which it reads from a table of
float16. The tolerance for models with GELU is the effect of this rounding in `transformers`.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    Exaone4Config,
    Gemma4TextConfig,
    GptOssConfig,
    Olmo3Config,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from services.common.gguf.architectures import ARCHITECTURES
from tests.checkpoints import SMALL, Oracle, write_family_checkpoint
from tests.ggufs import write_gguf
from tests.worker.models.test_gguf_architectures import (
    CONFIGS,
    FULL_AND_LOCAL,
    LAYERS,
    PROMPT,
)
from tests.worker.models.test_registry import (
    GEMMA4,
    GPT_OSS,
    HYBRID,
    HYBRID_EXPERTS,
    LATENT,
    WINDOWS,
    YARN,
)
from tests.worker.pipeline import Pipeline, Span

# Keys and values have heads of one size, and norms of keys and queries have an epsilon of 1e-6.
ONE_SIZE = {**HYBRID, "linear_value_head_dim": HYBRID["linear_key_head_dim"], "rms_norm_eps": 1e-6}
SECTIONS = [1, 1, 1, 0]  # of the rotated pairs, for three dimensions of positions
NO_WINDOW = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}

# Shapes that llama.cpp computes, in place of those of `CONFIGS` that it does not compute, or not as
# the model's authors do; docs/tested-checkpoints.md lists the differences.
FITTED: dict[str, PreTrainedConfig] = {
    "qwen3next": Qwen3NextConfig(**ONE_SIZE, **HYBRID_EXPERTS),
    "qwen35": Qwen3_5TextConfig(**ONE_SIZE),
    "qwen35-equal-heads": Qwen3_5TextConfig(**{**ONE_SIZE, "linear_num_value_heads": 2}),
    "qwen35moe": Qwen3_5MoeTextConfig(**ONE_SIZE, **HYBRID_EXPERTS),
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
        final_logit_softcapping=9.0,
    ),
    # The bounds of YaRN's ramp are whole numbers.
    "gpt-oss": GptOssConfig(
        **{**GPT_OSS, "rope_parameters": {**GPT_OSS["rope_parameters"], "rope_theta": 2.5}}
    ),
    "deepseek2-v2": DeepseekV2Config(
        **LATENT,
        routed_scaling_factor=1.5,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "olmo2-windows": Olmo3Config(
        **LAYERS,
        sliding_window=5,
        layer_types=WINDOWS,
        rope_parameters={"full_attention": YARN, "sliding_attention": NO_WINDOW},
    ),
    "olmoe": OlmoeConfig(
        **{**SMALL, "num_key_value_heads": 6},
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    ),
    "exaone4": Exaone4Config(
        **{**SMALL, "num_hidden_layers": 64, "initializer_range": 0.1},
        sliding_window=7,
        sliding_window_pattern=4,
    ),
}
NOT_COMPARED = {"gemma3n", "phi3-window"}
SHAPES = {
    name: FITTED.get(name, config) for name, config in CONFIGS.items() if name not in NOT_COMPARED
}

# Keys that published files have, and that converters do not write from what `transformers` writes.
METADATA: dict[str, dict[str, Any]] = {
    "deepseek2": {"deepseek2.expert_gating_func": 2},
    "deepseek2-glm": {"deepseek2.expert_gating_func": 2},
    "qwen35": {"qwen35.rope.dimension_sections": SECTIONS},
    "qwen35-equal-heads": {"qwen35.rope.dimension_sections": SECTIONS},
    "qwen35moe": {"qwen35moe.rope.dimension_sections": SECTIONS},
}


class LlamaCpp:
    """A process that computes logits with llama.cpp."""

    def __init__(self, to: IO[str], answers: IO[str]) -> None:
        self._to = to
        self._answers = answers

    def logits(self, file: Path, tokens: list[int]) -> Tensor:
        """Returns the logits after each token, [n_tokens, vocab_size]."""
        self._to.write(json.dumps({"model": str(file), "tokens": tokens}) + "\n")
        self._to.flush()
        return torch.tensor(json.loads(self._answers.readline())["logits"])


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    if "LLAMA_CPP_PYTHON" not in os.environ:
        pytest.skip("LLAMA_CPP_PYTHON names no Python that has llama.cpp")
    program = Path(__file__).with_name("logits_of_llama_cpp.py")
    with subprocess.Popen(
        [os.environ["LLAMA_CPP_PYTHON"], program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield LlamaCpp(process.stdin, process.stdout)
        process.stdin.close()


def with_float16(gelu: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda values: gelu(values.half().float()).half().float()


def effect_of_gelu(directory: Path) -> float:
    """Returns the largest change of a logit if GELU takes and returns float16."""
    exact, rounded = Oracle(directory), Oracle(directory)
    for module in rounded.modules():
        for key in ("act", "act_fn"):
            function = module._modules.pop(key, None) or vars(module).pop(key, None)
            if function is not None:
                is_gelu = "gelu" in f"{function!r}{type(function).__name__}".lower()
                setattr(module, key, with_float16(function) if is_gelu else function)
    return float((exact.logits(PROMPT) - rounded.logits(PROMPT)).abs().max())


def test_every_architecture_is_compared() -> None:
    # Models that see have the tensors and keys of the same models that do not.
    seeing = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
    assert {name.partition("-")[0] for name in SHAPES} | seeing | NOT_COMPARED >= {
        name.partition("-")[0] for name in ARCHITECTURES
    }


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_llama_cpp(llama_cpp: LlamaCpp, tmp_path: Path, name: str) -> None:
    write_family_checkpoint(tmp_path, SHAPES[name])
    # llama.cpp wants a vocabulary, and "no_vocab" is the one that has no texts.
    file = write_gguf(
        tmp_path,
        tmp_path / "model.gguf",
        tokenizer={"model": "no_vocab"},
        metadata=METADATA.get(name),
    )
    pipeline = Pipeline(file, dtype="float32")
    pipeline.admit(0, len(PROMPT))
    found = torch.cat([pipeline.run([Span(0, [token])])[1] for token in PROMPT])
    expected = llama_cpp.logits(file, PROMPT)
    tolerance = 5e-4 + 1.5 * effect_of_gelu(tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert tolerance < 0.05
    margins = expected.topk(2).values
    clear = margins[:, 0] - margins[:, 1] > 2 * tolerance
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
