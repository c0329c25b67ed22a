"""The tensors that a model asks for on behalf of one rank, and where it may take them from.

A model is built twice from the same code: first from `WantedTensors`, which records what it asks
for and answers with tensors that have no storage, then from a source that knows by then how much
there is to fill: `CheckpointTensors` or `RandomTensors`. So a wrong checkpoint is refused before a
single weight has been read, with all that is wrong with it.

Nothing is in memory that the rank does not keep. Of a tensor that ranks share, each reads its own
part. Parts that become one tensor (query, key and value; all experts) are read into their places
and not joined afterwards; of the matrices that are packed, one at a time is there twice.

Knows names, shapes and parts, not what a tensor is for.
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
from kernels.steps import ExpertMatrices
from kernels.weights.gated_in_two import GatedMatrix
from kernels.weights.linear import (
    Gate,
    LinearWeight,
    PlainWeight,
    Quantization,
    TableWeight,
)
from services.worker.models.config import UnsupportedModel

LoadFormat = Literal["safetensors", "random"]
OnProgress = Callable[[int, int], None]  # bytes done, bytes total

_MAX_ELEMENTS = 1 << 48  # of a tensor; no machine has as many, and their bytes can be counted
_PIECE_BYTES = 1 << 24  # filled at once


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor whose indices along `dim` are in `span`."""

    dim: int
    span: range


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or a shard of it, that becomes part of a tensor of the model."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor as it is stored
    shard: Shard | None = None
    is_transposed: bool = False  # the model wants the transpose of what is stored (two dimensions)
    is_mxfp4: bool = False  # it is stored as `quantised/mxfp4.py` says

    @property
    def spans(self) -> tuple[range, ...]:
        """The indices that are read, along each dimension as stored."""
        whole = tuple(range(size) for size in self.shape)
        if self.shard is None:
            return whole
        dim = self.shard.dim
        return (*whole[:dim], self.shard.span, *whole[dim + 1 :])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape in which the model gets the part."""
        sizes = tuple(len(span) for span in self.spans)
        return sizes[::-1] if self.is_transposed else sizes

    @property
    def n_elements(self) -> int:
        """The number of elements that are read."""
        return math.prod(self.out_shape)


class TensorSource(ABC):
    """Gives a model its tensors, on behalf of one of the ranks that share them.

    Matrices are of `quantization`, each rank's share by itself, but for those of experts.
    """

    def __init__(self, tp_rank: int, tp_size: int, quantization: Quantization = "none") -> None:
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.quantization = quantization

    def tensor(
        self,
        name: str,
        *shape: int,
        shard: Shard | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the tensor `name`, which must have that shape, or a shard of it.

        It is of `dtype`, by default the model's element type.
        """
        return self.joined([Part(name, shape, shard)], dtype=dtype)

    def joined(
        self,
        parts: Sequence[Part],
        order: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the parts joined along the first dimension; the other dimensions must agree.

        `order` are the places of its rows among those that are read, [n_rows], if they differ. The
        result is of `dtype`, by default the model's element type.
        """
        sizes = [part.out_shape[0] for part in parts]
        out = self._allocate((sum(sizes), *parts[0].out_shape[1:]), dtype)
        for part, place in zip(parts, torch.split(out, sizes), strict=True):
            self._read(part, place.t() if part.is_transposed else place)
        return out if order is None else out[order]

    def weight(self, parts: Sequence[Part], order: Tensor | None = None) -> LinearWeight:
        """Returns the joined parts packed as a layer's matrix; the plain one is gone by then."""
        return pack(self.joined(parts, order), self.quantization)

    def gated(self, parts: Sequence[Part], gate: Gate) -> GatedMatrix:
        """Returns the joined parts packed as one matrix: to gates, then to the numbers that are
        gated."""
        return pack_gated(self.joined(parts), gate, self.quantization)

    def experts(self, gate_up: Sequence[Sequence[Part]], down: Sequence[Part]) -> ExpertMatrices:
        """Returns experts gated by SiLU, of plain matrices whatever `quantization` says.

        `gate_up` has the parts of each expert's first matrix, the gate's first, and `down` the
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
        """Returns experts whose matrices are stored as one tensor each, [n_experts, n_out, n_in].

        `order` has the places of gates, and then of the numbers that are gated, among the outputs
        of `gate_up`. The matrices are plain, whatever `quantization` says.
        """
        return pack_experts(self.joined([gate_up])[:, order], self.joined([down]), form)

    def head(self, part: Part) -> LinearWeight:
        """Returns the matrix of a head, packed."""
        if self.quantization == "none":
            return pack(self.joined([part]))
        return self.table(part)

    def table(self, part: Part) -> TableWeight:
        """Returns a matrix to multiply with and to look up in, packed."""
        return pack_table(self.joined([part]), self.quantization)

    def rows(self, part: Part) -> TableWeight:
        """Returns a matrix to look up in, which stays as it is unless it is quantised."""
        if self.quantization == "none":
            return PlainWeight(self.joined([part]))
        return self.table(part)

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """Returns memory for a tensor of `dtype`, by default of the model's element type."""

    @abstractmethod
    def _read(self, part: Part, out: Tensor) -> None:
        """Fills `out`, which has the shape of the part as stored."""


class WantedTensors(TensorSource):
    """Records what a model asks for; its tensors have shapes and no storage."""

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
    """Counts the bytes of a share and reports them, first that there are none."""

    def __init__(self, n_bytes: int, on_progress: OnProgress) -> None:
        self._n_done = 0
        self._n_total = n_bytes
        self._on_progress = on_progress
        on_progress(0, n_bytes)

    def add(self, n_bytes: int) -> None:
        """Reports `n_bytes` more."""
        self._n_done += n_bytes
        self._on_progress(self._n_done, self._n_total)


def pieces(n_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts rows of `row_bytes` each into small pieces; yields the begin and the end of each."""
    size = max(1, _PIECE_BYTES // max(row_bytes, 1))
    for begin in range(0, n_rows, size):
        yield begin, min(begin + size, n_rows)
