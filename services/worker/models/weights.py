"""The tensors that a model needs on one rank, and the sources of these tensors.

A model is built twice by the same code. The first time, the source is `WantedTensors`, which
records the tensors that the model reads and returns tensors without storage. The second time, the
source is `CheckpointTensors` or `RandomTensors`, which was made with this record. So an invalid
checkpoint is refused before any weight is read, with a list of all problems.

Only tensors that the rank keeps are in memory. Each rank reads its own part of a tensor that ranks
share. Some parts become one tensor (query, key and value; all experts). They are read directly into
this tensor, so that they need not be joined afterwards. While a matrix is packed, this one matrix
is in memory twice.

This module handles names, shapes and parts, and does not depend on the purpose of a tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.forms.experts import ExpertForm
from kernels.packing.experts import pack_experts
from kernels.packing.linear import pack, pack_gated, pack_table
from kernels.program import Program
from kernels.steps import ExpertMatrices
from kernels.weights.gated_in_two import GatedMatrix
from kernels.weights.linear import (
    Activations,
    Gate,
    LinearWeight,
    PlainWeight,
    Quantization,
    TableWeight,
)
from services.worker.models.config import UnsupportedModel

LoadFormat = Literal["safetensors", "random"]
OnProgress = Callable[[int, int], None]  # bytes done, bytes total

_MAX_ELEMENTS = 1 << 48  # limit for a tensor, beyond any machine; 64 bits can count the bytes
_PIECE_BYTES = 1 << 24  # read at once


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that has the indices `span` along the dimension `dim`."""

    dim: int
    span: range


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or a shard of one, that becomes part of a tensor of the model."""

    name: str
    shape: tuple[int, ...]  # the whole stored tensor
    shard: Shard | None = None
    is_transposed: bool = False  # the model needs the transpose of the stored matrix
    is_mxfp4: bool = False  # stored in the layout of `quantised/mxfp4.py`

    @property
    def spans(self) -> tuple[range, ...]:
        """The range of indices that is read along each dimension of the stored tensor."""
        whole = tuple(range(size) for size in self.shape)
        if self.shard is None:
            return whole
        dim = self.shard.dim
        return (*whole[:dim], self.shard.span, *whole[dim + 1 :])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the part in the model."""
        sizes = tuple(len(span) for span in self.spans)
        return sizes[::-1] if self.is_transposed else sizes

    @property
    def n_elements(self) -> int:
        """The number of elements that are read."""
        return math.prod(self.out_shape)


class TensorSource(ABC):
    """A source from which a model gets the tensors of one rank.

    The matrices that `weight`, `gated`, `head`, `table` and `rows` return are quantised as
    `quantization` says, but experts and routers are not. `activations` says whether products with
    quantised matrices may round their inputs. Each rank's share is quantised separately.
    """

    def __init__(
        self,
        tp_rank: int,
        tp_size: int,
        quantization: Quantization = "none",
        activations: Activations = "rounded",
    ) -> None:
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.quantization = quantization
        self.activations = activations

    def tensor(
        self,
        name: str,
        *shape: int,
        shard: Shard | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the tensor `name`, or only a shard of it. The stored tensor must have the given
        shape.

        The result is of `dtype`, by default the model's element type.
        """
        return self.joined([Part(name, shape, shard)], dtype=dtype)

    def joined(
        self,
        parts: Sequence[Part],
        order: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the parts joined along the first dimension; the other dimensions must be equal.

        `order` [n_rows], if given, has for each row of the result its index among the rows that are
        read. The result is of `dtype`, by default the model's element type.
        """
        sizes = [part.out_shape[0] for part in parts]
        out = self._allocate((sum(sizes), *parts[0].out_shape[1:]), dtype)
        for part, place in zip(parts, torch.split(out, sizes), strict=True):
            self._read(part, place.t() if part.is_transposed else place)
        return out if order is None else out[order]

    def weight(self, parts: Sequence[Part], order: Tensor | None = None) -> LinearWeight:
        """Returns the joined parts, packed as the matrix of a linear layer. The unpacked matrix is
        not kept."""
        return pack(self.joined(parts, order), self.quantization, self.activations)

    def gated(self, parts: Sequence[Part], gate: Gate) -> GatedMatrix:
        """Returns the joined parts, packed as one matrix. The parts are the projection to gates,
        then the projection to the values that the gates multiply."""
        return pack_gated(self.joined(parts), gate, self.quantization, self.activations)

    def experts(self, gate_up: Sequence[Sequence[Part]], down: Sequence[Part]) -> ExpertMatrices:
        """Returns experts gated by SiLU. `quantization` does not apply to their matrices.

        `gate_up` has, for each expert, the parts of its first matrix: gate, then up. `down` has the
        second matrix of each expert.
        """
        first = self.joined([part for parts in gate_up for part in parts])
        second = self.joined(down)
        return pack_experts(
            first.view(len(down), -1, first.shape[1]),
            second.view(len(down), -1, second.shape[1]),
        )

    def stacked_experts(
        self, gate_up: Part, down: Part, order: Tensor, form: ExpertForm
    ) -> ExpertMatrices:
        """Returns experts from two tensors [n_experts, n_out, n_in], which hold the matrices of all
        experts.

        `order` has the indices among the outputs of `gate_up`: first of the gates, then of the
        values that the gates multiply. `quantization` does not apply to the matrices.
        """
        return pack_experts(self.joined([gate_up])[:, order], self.joined([down]), form)

    def head(self, part: Part) -> LinearWeight:
        """Returns the packed matrix of a head that does not share the embedding's table."""
        if self.quantization == "none":
            return pack(self.joined([part]))
        return self.table(part)

    def table(self, part: Part) -> TableWeight:
        """Returns a packed matrix that is used for both multiplication and row look-up."""
        return pack_table(self.joined([part]), self.quantization, self.activations)

    def rows(self, part: Part) -> TableWeight:
        """Returns a matrix that is used only for row look-up. It is packed only if it is
        quantised."""
        if self.quantization == "none":
            return PlainWeight(self.joined([part]))
        return self.table(part)

    def adapted(self, program: Program) -> Program:
        """Returns `program`, the program of a stage, with the steps that this source adds for its
        adapters. The default has no adapters, and returns `program` itself."""
        return program

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """Allocates memory for a tensor of `dtype`, by default the model's element type."""

    @abstractmethod
    def _read(self, part: Part, out: Tensor) -> None:
        """Reads the values of `part` into `out`, which has the shape that the part has in the file,
        before any transposition."""


class WantedTensors(TensorSource):
    """Records the tensors that a model asks for. The tensors that it returns have shapes but no
    storage."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__(tp_rank, tp_size)
        self.parts: list[Part] = []

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        if math.prod(shape) > _MAX_ELEMENTS:
            raise UnsupportedModel(f"config.json: a tensor of {list(shape)} elements")
        return torch.empty(shape, dtype=dtype, device="meta")

    def _read(self, part: Part, out: Tensor) -> None:
        self.parts.append(part)


class Progress:
    """Counts the bytes of a rank's share that have been read, and reports each change. The first
    report says 0 bytes."""

    def __init__(self, n_bytes: int, on_progress: OnProgress) -> None:
        self._n_done = 0
        self._n_total = n_bytes
        self._on_progress = on_progress
        on_progress(0, n_bytes)

    def add(self, n_bytes: int) -> None:
        """Adds `n_bytes` to the bytes that have been read, and reports the sum."""
        self._n_done += n_bytes
        self._on_progress(self._n_done, self._n_total)


def pieces(n_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Divides rows of `row_bytes` bytes each into small pieces. Yields the first row of each piece
    and the row after its last one."""
    size = max(1, _PIECE_BYTES // max(row_bytes, 1))
    for begin in range(0, n_rows, size):
        yield begin, min(begin + size, n_rows)
