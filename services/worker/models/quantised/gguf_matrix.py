"""Reads matrices of GGUF blocks without dequantising them.

A row consists of blocks, one after the other. `gguf_blocks.py` has the types of blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.weights.groups import MULTIPLE, GroupForm
from services.worker.models.gguf_file import GgufFile
from services.worker.models.quantised.gguf_block_type import BlockType
from services.worker.models.quantised.gguf_blocks import TYPES
from services.worker.models.stored_tensor import GroupedTensor, PlainTensor, Spans


class GgufMatrix(PlainTensor, GroupedTensor):
    """A matrix in GGUF blocks. It can stay quantised if its type is in `gguf_blocks.TYPES`;
    otherwise it is dequantised."""

    def __init__(self, files: GgufFile, name: str) -> None:
        super().__init__(files, name)
        self._file = files
        self._type = TYPES.get(files.block_type(name))
        self.has_offsets = self._type is not None and self._type.has_offsets

    def group_form(self, spans: Spans) -> GroupForm | None:
        if self._type is None:
            return None
        size = math.gcd(self._type.group_size, spans[1].start)
        return None if size % MULTIPLE else GroupForm(self._type.bits, size, self._type.values)

    def read_numbers(self, spans: Spans) -> Tensor:
        rows, columns = spans
        kind = self._known_type
        numbers = kind.numbers(self._blocks(kind, rows)).view(len(rows), -1)
        return numbers[:, columns.start : columns.stop]

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        kind = self._known_type
        scales, offsets = kind.scales(self._blocks(kind, rows))
        groups = torch.arange(columns.start, columns.stop, form.size) // kind.group_size
        found = scales.view(len(rows), -1)[:, groups]
        return found, None if offsets is None else offsets.view(len(rows), -1)[:, groups]

    @property
    def _known_type(self) -> BlockType:
        if self._type is None:
            raise ValueError(f"{self._name} is not read as numbers")
        return self._type

    def _blocks(self, kind: BlockType, rows: range) -> Tensor:
        """Returns the bytes of all blocks in the rows, one block after the other, [n, n_bytes]."""
        return self._file.read_blocks(self._name, rows).view(-1, kind.n_bytes)
