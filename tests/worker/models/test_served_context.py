"""Which context is served, and from where its length is known."""

from typing import Any

import pytest

from services.common.context_length import context_length
from services.common.derived import Derived
from services.worker.models import UnsupportedModel
from services.worker.models.config_json import parse_with_sources
from tests.checkpoints import SMALL
from tests.worker.models.test_rope import LONGROPE

CONFIG = {key: value for key, value in SMALL.items() if key != "initializer_range"} | {
    "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
}  # fmt: skip
ORIGINAL = "original_max_position_embeddings"


def context(max_model_len: int | None = None, **config: Any) -> Derived[int]:
    read = parse_with_sources({**CONFIG, **config}, {}, max_model_len=max_model_len)
    found = read.derived["context"]
    assert read.config.max_position_embeddings == found.value
    return found


@pytest.mark.parametrize(
    ("config", "length", "source"),
    [
        ({}, 4096, "max_position_embeddings"),
        # As model cards of Qwen advise, in the older and the newer spelling.
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 4096}},
            16384,
            f"{ORIGINAL} 4096 times rope_scaling.factor 4",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.5, ORIGINAL: 3000}},
            7500,
            f"{ORIGINAL} 3000 times rope_parameters.factor 2.5",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            16384,
            "max_position_embeddings 4096 times rope_scaling.factor 4",
        ),
        # The length that counts the factor already, and one beyond it.
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, ORIGINAL: 1024}},
            4096,
            "max_position_embeddings",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, ORIGINAL: 1024}},
            4096,
            "max_position_embeddings",
        ),
        # As vLLM has it: Vicuna's context is stretched, and that of Llama 3.1 and of "dynamic" not.
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            16384,
            "max_position_embeddings 4096 times rope_scaling.factor 4",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, ORIGINAL: 2048}},
            4096,
            "max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096, "max_position_embeddings"),
        (
            {"rope_parameters": {"rope_type": "longrope", **LONGROPE, ORIGINAL: 512}},
            512,
            f"{ORIGINAL} of longrope, so that the short factors hold; set max_model_len for more, "
            "up to 4096 tokens",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", **LONGROPE, ORIGINAL: 4096}},
            4096,
            "max_position_embeddings",
        ),
    ],
)  # fmt: skip
def test_the_context_is_the_one_that_the_authors_mean(
    config: dict[str, Any], length: int, source: str
) -> None:
    assert context(**config) == Derived(length, source)


def test_gemma_3_states_the_context_with_the_factor_in_it() -> None:
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 32,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    assert context(**config).value == 4096


def test_the_setting_is_served_up_to_the_context_and_refused_beyond() -> None:
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 4096}}
    assert context(16384, **yarn) == Derived(16384, "the setting max_model_len")
    assert context(100, **yarn).value == 100
    with pytest.raises(UnsupportedModel, match=r"^max_model_len \(16385\) is more than .* 16384"):
        context(16385, **yarn)


def test_long_factors_hold_for_all_sequences_if_the_setting_is_beyond_the_original_context() -> (
    None
):
    config = {**CONFIG, "rope_parameters": {"rope_type": "longrope", **LONGROPE, ORIGINAL: 512}}
    for max_model_len, factors in ((None, "short"), (512, "short"), (513, "long")):
        read = parse_with_sources(config, {}, max_model_len=max_model_len)
        assert read.derived["rope"].value == f"longrope, base 10000, {factors} factors"


def test_frontends_take_prompts_of_the_stretched_context(tmp_path: Any) -> None:
    import json

    config = {**CONFIG, "rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 4096}}
    for whole in (config, {"text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert context_length(tmp_path) == 16384
