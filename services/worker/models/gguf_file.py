"""The tensors of a GGUF file, read dequantised or as the stored blocks.

Dequantisation is the arithmetic of the package `gguf`, row by row. `quantised/gguf_matrix.py` reads
some of the blocks as quantised matrices instead. Converters to GGUF change two things, and this
module reverts both. First, llama.cpp rotates pairs of neighbouring elements of a head where
checkpoints rotate elements half a head apart. Therefore the rows of Llama's queries and keys lie in
another order. Second, the weights of Gemma's norms have 1 added in the file, which the model adds
itself.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from services.common.gguf.header import GgufHeader, TensorPlace
from services.worker.models.config import ModelConfig
from services.worker.models.tensor_files import CheckpointError, Header, TensorFiles

# The element types that can be read, by number.
_TYPES = {
    int(GGMLQuantizationType[name]): GGMLQuantizationType[name]
    for name in (
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K",
        "Q5_K", "Q6_K", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS",
        "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
    )
}  # fmt: skip

# Names of tensors in families, and in GGUF files.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Gemma also has norms after attention and MLP.
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_QUERIES, _KEYS = ".attn_q.", ".attn_k."


class GgufFile(TensorFiles):
    """An open GGUF file; only the requested rows are read into memory."""

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        self._fd: int | None = None
        self._header = header
        self._size = header.path.stat().st_size
        architecture = header.metadata["general.architecture"]
        self._is_gemma = architecture.startswith("gemma")
        self._heads: Mapping[str, int] = {}
        if architecture == "llama":
            self._heads = {_QUERIES: config.n_heads, _KEYS: config.n_kv_heads}

    def __str__(self) -> str:
        return str(self._header.path)

    def __del__(self) -> None:
        self.close()

    def find(self, name: str) -> str | None:
        stem, _, end = name.rpartition(".")
        found = f"{_NAMES.get(stem)}.{end}"
        if in_layer := _LAYER.fullmatch(name):
            index, module, end = in_layer.groups()
            names = {**_LAYER_NAMES, **_GEMMA_NAMES} if self._is_gemma else _LAYER_NAMES
            found = f"blk.{index}.{names.get(module)}.{end}"
        return found if found in self._header.tensors else None

    def header(self, name: str) -> Header:
        """Returns the header of the tensor as `read` returns the tensor, in float32.

        Raises CheckpointError if the file ends inside the tensor.
        """
        place = self._header.tensors[name]
        row = math.prod(place.shape[1:])
        if not place.shape or place.type not in _TYPES or not _has_whole_blocks(place):
            return Header(place.shape, _name_of(place.type), 4 * row)
        if place.offset + place.shape[0] * _row_bytes(place) > self._size:
            raise CheckpointError(f"{self} ends inside {name}")
        return Header(place.shape, "F32", 4 * row)

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        place = self._header.tensors[name]
        found = self._rows_in_order(name, place, spans[0], self._rows)
        if self._is_gemma and name.endswith("norm.weight"):
            found = found - 1
        index = tuple(slice(span.start, span.stop) for span in spans[1:])
        return found.view(len(spans[0]), *place.shape[1:])[:, *index]

    def is_in_blocks(self, name: str) -> bool:
        """Whether a tensor is a matrix whose rows divide into whole quantised blocks."""
        place = self._header.tensors[name]
        if len(place.shape) != 2 or place.type not in _TYPES or not _has_whole_blocks(place):
            return False
        return GGML_QUANT_SIZES[_TYPES[place.type]][0] > 1

    def block_type(self, name: str) -> str:
        """Returns the name of a tensor's GGUF type."""
        return _name_of(self._header.tensors[name].type)

    def read_blocks(self, name: str, rows: range) -> Tensor:
        """Returns rows of a matrix as stored blocks, [n_rows, bytes of a row]."""
        place = self._header.tensors[name]
        return self._rows_in_order(name, place, rows, self._stored_rows)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _rows_in_order(
        self,
        name: str,
        place: TensorPlace,
        rows: range,
        read: Callable[[str, TensorPlace, range], Tensor],
    ) -> Tensor:
        """Returns rows in the order of a checkpoint's rows, [n_rows, n]; `read` returns rows of the
        file."""
        n_heads = next((n for part, n in self._heads.items() if part in name), 0)
        if not n_heads:
            return read(name, place, rows)
        size = place.shape[0] // n_heads
        heads = range(rows.start // size, -(-rows.stop // size))
        neighbours = read(name, place, range(heads.start * size, heads.stop * size))
        pairs = neighbours.view(len(heads), size // 2, 2, -1)
        halves = pairs.transpose(1, 2).reshape(neighbours.shape)
        skipped = rows.start - heads.start * size
        return halves[skipped : skipped + len(rows)]

    def _rows(self, name: str, place: TensorPlace, rows: range) -> Tensor:
        """Returns dequantised rows in the order of the file, [n_rows, n_columns]."""
        n_columns = math.prod(place.shape[1:])
        if not rows:
            return torch.empty(0, n_columns)
        blocks = self._stored_rows(name, place, rows).numpy()
        values: np.ndarray[Any, Any] = dequantize(blocks, _TYPES[place.type])
        return torch.from_numpy(values.reshape(len(rows), n_columns))

    def _stored_rows(self, name: str, place: TensorPlace, rows: range) -> Tensor:
        """Returns the stored bytes of rows in the order of the file, [n_rows, bytes of a row]."""
        row_bytes = _row_bytes(place)
        if not rows:
            return torch.empty(0, row_bytes, dtype=torch.uint8)
        content = bytearray(len(rows) * row_bytes)
        if self._fd is None:
            self._fd = os.open(self._header.path, os.O_RDONLY)
        n_read = os.preadv(self._fd, [content], place.offset + rows.start * row_bytes)
        if n_read < len(content):
            raise CheckpointError(f"{self} ends inside {name}")
        return torch.frombuffer(content, dtype=torch.uint8).view(len(rows), row_bytes)


def _has_whole_blocks(place: TensorPlace) -> bool:
    """Whether each row divides into whole blocks (elements that share scales)."""
    return math.prod(place.shape[1:]) % GGML_QUANT_SIZES[_TYPES[place.type]][0] == 0


def _row_bytes(place: TensorPlace) -> int:
    n_per_block, n_bytes = GGML_QUANT_SIZES[_TYPES[place.type]]
    n_blocks = math.prod(place.shape[1:]) // n_per_block
    return n_blocks * n_bytes


def _name_of(kind: int) -> str:
    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"
