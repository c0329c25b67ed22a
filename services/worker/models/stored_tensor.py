"""A tensor of a checkpoint in the form in which the files store it, read piece by piece.

Some matrices are stored as quantised numbers, with a scale for each group of inputs. Such a matrix
can stay quantised, and then takes as little memory in the model as in the files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from kernels.weights.groups import GroupForm
from services.worker.models.tensor_files import TensorFiles
from services.worker.models.weights import pieces

Spans: TypeAlias = tuple[range, ...]  # indices in each dimension

FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""Element types of plain tensors. Their values are read by a cast alone."""


class StoredTensor(ABC):
    """One stored tensor. Arguments named `spans` have an index range for each dimension of the
    shape with which the model asks for the tensor."""

    @abstractmethod
    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        """Yields the reasons why the stored tensor is not a valid tensor of `shape`. Reads no
        values."""

    @abstractmethod
    def pieces(self, spans: Spans) -> Iterator[Spans]:
        """Divides the part `spans` into small pieces, which together cover the part."""

    @abstractmethod
    def n_bytes(self, spans: Spans) -> int:
        """Returns the number of bytes that a piece takes in the files."""

    @abstractmethod
    def read(self, spans: Spans) -> Tensor:
        """Reads a piece and returns it on the CPU, in any floating-point type."""


class GroupedTensor(StoredTensor):
    """A matrix of quantised numbers with scales. Some of its parts can be read without dequantising
    (`group_form`)."""

    has_offsets: bool  # groups have offsets besides scales; all may be zero
    is_rounded = False  # the numbers that are read without dequantising are not exact

    @abstractmethod
    def group_form(self, spans: Spans) -> GroupForm | None:
        """Returns the form (bits, group size and values) in which the part `spans` can stay
        quantised, or None if the part must be dequantised."""

    @abstractmethod
    def read_numbers(self, spans: Spans) -> Tensor:
        """Returns the quantised numbers of a piece, [n_rows, n_columns], in the encoding of
        `GroupedMatrix`. The piece must belong to a part for which `group_form` is not None."""

    @abstractmethod
    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        """Returns the scales and the offsets of a part, [n_rows, n_groups] each. The offsets are
        None if the layout has none."""


class PlainTensor(StoredTensor):
    """A tensor of floats that the files store without quantisation."""

    def __init__(self, files: TensorFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._header = files.header(name)

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        if self._header.shape != shape:
            yield f"{self._name} has shape {list(self._header.shape)}, not {list(shape)}"
        elif self._header.element not in FLOATS:
            yield f"{self._name} has element type {self._header.element}"

    def pieces(self, spans: Spans) -> Iterator[Spans]:
        rows, *others = spans
        for begin, end in pieces(len(rows), self._header.row_bytes):
            yield (range(rows.start + begin, rows.start + end), *others)

    def n_bytes(self, spans: Spans) -> int:
        # Only the share of a row is counted, although whole pages are read.
        n_columns = n_all = 1
        for span, size in zip(spans[1:], self._header.shape[1:], strict=True):
            n_columns, n_all = n_columns * len(span), n_all * size
        return len(spans[0]) * self._header.row_bytes * n_columns // max(n_all, 1)

    def read(self, spans: Spans) -> Tensor:
        return self._files.read(self._name, spans)
