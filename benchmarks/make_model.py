"""A checkpoint of random weights that every engine can load, in a shape that all benchmarks use.

    python -m benchmarks.make_model DIR [--shape llama-125m]

Writes config.json, the weights, and a tokenizer with as many ids as the model has. The weights are
bfloat16 from a normal distribution with standard deviation 0.02. They have a fixed seed, so that
all files have the same bytes every time. The tokens are single bytes, then pieces of two, three and
four printable characters, so that the output of a random model is printable text.
"""

import argparse
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

STD = 0.02
SEED = 0
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")  # ids 0, 1 and 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama with a separate output matrix, or of a Mixtral if there are experts."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    n_experts: int = 0
    n_chosen: int = 0
    """Number of experts that compute each token."""


SHAPES = {
    "llama-tiny": Shape(64, 176, 2, 4, 2, 16, 1024, 2048),
    "llama-125m": Shape(768, 2048, 12, 12, 4, 64, 32000, 2048),
    "llama-350m": Shape(1024, 2816, 24, 16, 8, 64, 32000, 2048),
    "mixtral-8x20m": Shape(512, 1536, 8, 8, 4, 64, 32000, 2048, n_experts=8, n_chosen=2),
}


def config_of(shape: Shape) -> dict[str, object]:
    """Returns the contents of the checkpoint's config.json."""
    if shape.n_experts:
        family: dict[str, object] = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": shape.n_experts,
            "num_experts_per_tok": shape.n_chosen,
        }
    else:
        family = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
        }
    return {
        **family,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "pad_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": STD,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.n_heads,
        "num_hidden_layers": shape.n_layers,
        "num_key_value_heads": shape.n_kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor, by name."""
    hidden = shape.hidden_size
    n_q, n_kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (n_q, hidden),
        "self_attn.k_proj": (n_kv, hidden),
        "self_attn.v_proj": (n_kv, hidden),
        "self_attn.o_proj": (hidden, n_q),
        "post_attention_layernorm": (hidden,),
        **_mlp_shapes(shape),
    }
    return {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        **{
            f"model.layers.{index}.{name}.weight": sizes
            for index in range(shape.n_layers)
            for name, sizes in layer.items()
        },
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab_size, hidden),
    }


def _mlp_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the MLP or expert matrices of a layer, by name."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if not shape.n_experts:
        return {
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
    experts = [f"block_sparse_moe.experts.{index}" for index in range(shape.n_experts)]
    return {
        "block_sparse_moe.gate": (shape.n_experts, hidden),
        **{f"{expert}.{name}": (inner, hidden) for expert in experts for name in ("w1", "w3")},
        **{f"{expert}.w2": (hidden, inner) for expert in experts},
    }


def random_weights(shape: Shape) -> dict[str, Tensor]:
    """Returns all tensors by name: norms are ones, matrices are sampled in the order of
    `weight_shapes`."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, sizes in tqdm(weight_shapes(shape).items(), desc="weights", leave=False):
        if len(sizes) == 1:
            weights[name] = torch.ones(sizes, dtype=torch.bfloat16)
        else:
            weights[name] = torch.randn(sizes, generator=generator).mul_(STD).bfloat16()
    return weights


def tokenizer_of(vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer of exactly `vocab_size` ids.

    Raises ValueError if `vocab_size` is smaller than the number of special tokens and bytes, or
    larger than the number of possible tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*SPECIAL_TOKENS, *alphabet]
    merges = list(islice(_merges(), vocab_size - len(vocabulary)))
    vocabulary += [left + right for left, right in merges]
    if len(vocabulary) != vocab_size:
        raise ValueError(f"a vocabulary has at least {len(vocabulary)} tokens, not {vocab_size}")
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Yields pairs of tokens to merge into a new token. Each token of a pair is a byte or the
    result of an earlier merge.

    First come 9,025 pairs of two characters (the byte level writes a space as Ġ), then 17,576 of
    three lower-case letters, and 456,976 of four.
    """
    letters = string.ascii_lowercase
    yield from product("Ġ" + string.digits + string.ascii_letters + string.punctuation, repeat=2)
    for first, second, third in product(letters, repeat=3):
        yield first + second, third
    for pair in product(letters, repeat=4):
        yield "".join(pair[:2]), "".join(pair[2:])


def write_model(directory: Path, shape: Shape) -> None:
    """Writes the checkpoint into `directory`, which is created if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_of(shape.vocab_size).save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", config_of(shape))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": shape.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    )
    # Engines that read with transformers refuse a file that does not say what wrote it.
    save_file(random_weights(shape), directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--shape", choices=SHAPES, default="llama-125m")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    write_model(arguments.directory, shape)
    n_bytes = sum(path.stat().st_size for path in arguments.directory.iterdir())
    print(f"{arguments.shape} in {arguments.directory}, {n_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
