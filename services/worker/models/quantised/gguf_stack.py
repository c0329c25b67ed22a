"""Stacks of matrices in GGUF blocks: the matrices of all experts of a layer."""

from __future__ import annotations

from torch import Tensor

from kernels.weights.groups import GroupForm
from services.worker.models.gguf_file import GgufFile
from services.worker.models.quantised.gguf_matrix import GgufMatrix
from services.worker.models.stored_tensor import GroupedTensor, PlainTensor, Spans


class GgufStack(PlainTensor, GroupedTensor):
    """A tensor [n, n_out, n_in], which holds `n` matrices. If it stays quantised, its matrices are
    read one at a time, each like a `GgufMatrix`."""

    def __init__(self, files: GgufFile, name: str) -> None:
        super().__init__(files, name)
        self._matrices = GgufMatrix(files, name) if files.is_in_blocks(name) else None
        self.has_offsets = self._matrices is not None and self._matrices.has_offsets

    def group_form(self, spans: Spans) -> GroupForm | None:
        return None if self._matrices is None else self._matrices.group_form(spans[1:])

    def read_numbers(self, spans: Spans) -> Tensor:
        return self._in_blocks.read_numbers(self._rows(spans))[None]

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        scales, offsets = self._in_blocks.read_scales(self._rows(spans), form)
        return scales[None], None if offsets is None else offsets[None]

    @property
    def _in_blocks(self) -> GgufMatrix:
        if self._matrices is None:
            raise ValueError(f"{self._name} is not read as numbers")
        return self._matrices

    def _rows(self, spans: Spans) -> Spans:
        """Converts a part of one matrix to a range of rows, counted across all matrices of the
        stack."""
        matrices, rows, columns = spans
        if len(matrices) != 1:
            raise ValueError(f"{self._name} is read one matrix at a time")
        first = matrices.start * self._header.shape[1]
        return range(first + rows.start, first + rows.stop), columns
