"""Writes checkpoints as GGUF files, with the package that defines the format.

The names of tensors are taken from the package's own table. `gguf_tensors.py` converts the tensors,
and `gguf_metadata.py` the configuration, both as llama.cpp's converter does.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_metadata import ARCHITECTURES, said
from tests.gguf_tensors import arranged


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    rope_freqs: Tensor | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    n_files: int = 1,
    is_dequantised: bool = False,
    claims: str | None = None,
) -> Path:
    """Writes the model of a checkpoint as a GGUF file. Its matrices are stored as `kind`, and
    `metadata` overrides entries of the metadata. Returns the path of the first of `n_files` files.

    `tokenizer` has the values of the keys `tokenizer.ggml.…`, by the ends of these keys. With
    `is_dequantised`, matrices are quantised to `kind`, and the file has the floats to which they
    are dequantised. `claims` is the name of an architecture that the file states instead of its
    own.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    values = said(config, claims or architecture) | dict(metadata or {})
    for key, value in (tokenizer or {}).items():
        prefix = "tokenizer" if key.startswith("chat_template") else "tokenizer.ggml"
        values[f"{prefix}.{key}"] = value
    tensors = arranged(load_file(checkpoint / "model.safetensors"), config, architecture)
    if rope_freqs is not None:
        tensors["rope_freqs.weight"] = rope_freqs
    names, paths = sorted(tensors), [path]
    if n_files > 1:
        ends = [f"-{number:05}-of-{n_files:05}.gguf" for number in range(1, n_files + 1)]
        paths = [path.with_name(path.stem + end) for end in ends]
    for number, file in enumerate(paths):
        split = {"split.no": number, "split.count": n_files, "split.tensors.count": len(names)}
        writer = GGUFWriter(file, claims or architecture)
        for key, value in ({} if number else values).items():
            if value is not None:
                add(writer, key, value)
        for key, value in split.items() if n_files > 1 else ():
            (writer.add_int32 if key.endswith("tensors.count") else writer.add_uint16)(key, value)
        for name in names[number::n_files]:
            _add_tensor(writer, name, tensors[name], kind, is_dequantised=is_dequantised)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def _add_tensor(
    writer: GGUFWriter,
    name: str,
    tensor: Tensor,
    kind: GGMLQuantizationType,
    *,
    is_dequantised: bool,
) -> None:
    """Adds a tensor to a file, as `kind` if it is a matrix whose rows consist of whole blocks.
    Vectors, and the biases and scales of experts, are stored as floats."""
    values = tensor.float().contiguous().numpy()
    is_matrix = values.ndim > 1 and name.endswith(".weight") and "conv1d" not in name
    is_whole = values.ndim > 1 and values.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
    own = kind if is_matrix and is_whole else GGMLQuantizationType.F32
    stored = quantize(values, own)
    if is_dequantised:
        stored, own = dequantize(stored, own), GGMLQuantizationType.F32
    writer.add_tensor(name, stored, raw_dtype=own)


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Adds a value to the metadata, with the type that converters choose for such a value."""
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
    """Returns the GGUF metadata of the byte-level BPE in a `tokenizer.json`."""
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
    """Returns rows of random bytes, which can be read as blocks of any type. One bit of each byte
    is always 0, so that no scale is infinite."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (n_rows, row_bytes), dtype=np.uint8) & np.uint8(0xBF)
