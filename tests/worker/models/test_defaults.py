"""A key that a file lacks has the value that `transformers` gives it, in each family.

Configurations are whole ones of `transformers`, without one key. Either the key is required, or the
configuration is the one of the file in which `transformers` has filled the key in.
"""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.worker.models import ModelConfig, UnsupportedModel
from services.worker.models.config_json import parse_config
from services.worker.models.registry import FAMILIES

logging.set_verbosity_error()

# Types of architectures that several types have.
_TYPES = {
    "LlamaForCausalLM": "llama",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "BertModel": "bert",
    "CamembertModel": "camembert",
    "RobertaModel": "roberta",
    "XLMRobertaModel": "xlm-roberta",
}
_ALL = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()} | _TYPES
# `transformers` fills in values for which Gemma 4 has further keys (see test_hub_configs.py).
ARCHITECTURES = sorted({*FAMILIES} - {"Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"})

# Keys whose defaults differ between families.
OFTEN = ("eos_token_id", "num_key_value_heads", "rope_parameters", "tie_word_embeddings")


def parsed(config: Mapping[str, Any]) -> ModelConfig | None:
    try:
        return parse_config(config, {})
    except UnsupportedModel:
        return None


def check(architecture: str, keys: tuple[str, ...] | None) -> None:
    make = CONFIG_MAPPING[_ALL[architecture]]
    whole = {**make().to_dict(), "architectures": [architecture]}
    if architecture == "DeepseekV2ForCausalLM":
        whole["num_experts_per_tok"] = 2  # null by default, with which no router works
    assert parsed(whole) is not None
    for key in keys or set(whole) - {"architectures", "model_type"}:
        file = {name: value for name, value in whole.items() if name != key}
        found = parsed(file)
        if found is not None:
            filled = make.from_dict(copy.deepcopy(file)).to_dict()
            expected = parsed({**filled, "architectures": [architecture]})
            assert found == expected, f"without {key}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_often_misses_has_the_oracles_default(architecture: str) -> None:
    check(architecture, OFTEN)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_key_that_misses_has_the_oracles_default(architecture: str) -> None:
    check(architecture, None)
