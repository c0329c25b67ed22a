"""Shapes of published models: each is one that this project serves."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig

from benchmarks.published_shapes import SHAPES, write_checkpoint
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config_json import parse_config

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_is_served(name: str) -> None:
    fields = AutoConfig.for_model(**SHAPES[name]).to_dict()
    architecture = {
        "gpt2": "GPT2LMHeadModel",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
    }[fields["model_type"]]
    config = parse_config({**fields, "architectures": [architecture]}, {})
    assert config.n_layers == fields.get("num_hidden_layers", fields.get("n_layer"))
    assert config.vocab_size == fields["vocab_size"]


def test_a_checkpoint_has_as_many_tokens_as_its_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**SHAPES["qwen3-0.6b"], **SMALL})
    config = open_checkpoint(tmp_path, load_format="random").config
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert config.vocab_size == tokenizer.get_vocab_size() == 300
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
