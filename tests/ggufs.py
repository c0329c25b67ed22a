"""Writes checkpoints as GGUF files, with the package that defines the format.

Names, the order of rows and Gemma's norms are those of llama.cpp's converter.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
IN_LAYERS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
IN_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, architecture: str) -> str:
    """Returns the name that a tensor has in a GGUF file."""
    stem, _, end = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{end}"
    _, _, index, module = stem.split(".", 3)
    names = IN_LAYERS | (IN_GEMMA if architecture.startswith("gemma") else {})
    return f"blk.{index}.{names[module]}.{end}"


def converted(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Returns a tensor as the converter changes it."""
    architecture = ARCHITECTURES[config["architectures"][0]]
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture == "llama" and projection in name:
            heads = tensor.view(config[key], 2, -1, *tensor.shape[1:])
            return heads.transpose(1, 2).reshape(tensor.shape)
    return tensor


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    rope_freqs: Tensor | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint's model; matrices are of `kind`, and `metadata` overrides what is said.

    `tokenizer` are the values of `tokenizer.ggml.…`, by the ends of these keys.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(path, architecture)
    for key, value in (said(config, architecture) | dict(metadata or {})).items():
        add(writer, key, value)
    for key, value in (tokenizer or {}).items():
        prefix = "tokenizer" if key.startswith("chat_template") else "tokenizer.ggml"
        add(writer, f"{prefix}.{key}", value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.numpy())
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = converted(name, tensor.float(), config).contiguous().numpy()
        own = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name, architecture), quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def said(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the metadata that a configuration becomes."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(full.get("rope_theta", 10_000.0)),
        "vocab_size": config["vocab_size"],
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    return {f"{architecture}.{key}": value for key, value in values.items() if value is not None}


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Adds a value of the type that converters would choose."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def vocabulary(tokenizer_json: Mapping[str, Any], *, pre: str) -> dict[str, Any]:
    """Returns the metadata of the byte-level BPE in a `tokenizer.json`."""
    tokens = sorted(tokenizer_json["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer_json["added_tokens"]}
    merges = tokenizer_json["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [token for token, _ in tokens],
        "token_type": [
            int(TokenType.CONTROL if token in special else TokenType.NORMAL) for token, _ in tokens
        ],
        "merges": [" ".join(pair) for pair in merges],
    }


def random_blocks(n_rows: int, row_bytes: int) -> np.ndarray[Any, Any]:
    """Returns rows of random bytes, of which any type of blocks can be read.

    Without one of their bits no scale in them is infinite.
    """
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (n_rows, row_bytes), dtype=np.uint8) & np.uint8(0xBF)
