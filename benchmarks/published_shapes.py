"""A checkpoint of random weights in the shape of a published model, as `transformers` writes it.

    python -m benchmarks.published_shapes qwen3-0.6b DIR

The speed of a model depends on its shape alone, and the published weights may not be available. The
weights are bfloat16, with a fixed seed. The tokenizer is made as in `benchmarks.make_model`, with
as many tokens as the model has. Needs `transformers` (`pip install -e '.[dev]'`).
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.make_model import SEED, tokenizer_of

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt2-124m": {"model_type": "gpt2"},  # the defaults of its configuration are this model
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
    },
}
"""Fields of `config.json`, by the name of the shape. All other fields have the defaults of the
family's configuration."""

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def write_checkpoint(directory: Path, fields: Mapping[str, Any]) -> None:
    """Writes a checkpoint with the configuration `fields` into `directory`, which is created if it
    is missing."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(**{**fields, **TOKENS})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer_of(config.vocab_size).save(str(directory / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    write_checkpoint(arguments.directory, SHAPES[arguments.shape])
    print(f"{arguments.shape} in {arguments.directory}")


if __name__ == "__main__":
    main()
