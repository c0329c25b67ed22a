"""A tensor of a checkpoint in the form in which its files hold it, read piece by piece.

Some matrices are numbers of a few bits in groups of inputs. These can be read as such, and then
take as little memory in the model as in the files.
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
"""Element types that need nothing but a cast."""


class StoredTensor(ABC):
    """One tensor; its spans are those of the tensor that the model asks for."""

    @abstractmethod
    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        """Yields what keeps this from being a tensor of `shape`; nothing is read before."""

    @abstractmethod
    def pieces(self, spans: Spans) -> Iterator[Spans]:
        """Cuts a part into small ones, which together are all of it."""

    @abstractmethod
    def n_bytes(self, spans: Spans) -> int:
        """Returns the bytes that a piece has in the files."""

    @abstractmethod
    def read(self, spans: Spans) -> Tensor:
        """Returns a piece, on the CPU, of any type of floats."""


class GroupedTensor(StoredTensor):
    """A matrix of numbers with scales, parts of which may be in groups of neighbouring inputs."""

    has_offsets: bool  # of groups, beside their scales; they may all be zero

    @abstractmethod
    def group_form(self, spans: Spans) -> GroupForm | None:
        """Returns the form in which a part can be read as numbers; None if it cannot."""

    @abstractmethod
    def read_numbers(self, spans: Spans) -> Tensor:
        """Returns the numbers of a piece of such a part, [n_rows, n_columns], as `GroupedMatrix`
        has them."""

    @abstractmethod
    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        """Returns the scales of a part and its offsets, if it has any, [n_rows, n_groups] each."""


class PlainTensor(StoredTensor):
    """Floats as they are."""

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
        # A share of a row counts as such, though its pages are read whole.
        n_columns = n_all = 1
        for span, size in zip(spans[1:], self._header.shape[1:], strict=True):
            n_columns, n_all = n_columns * len(span), n_all * size
        return len(spans[0]) * self._header.row_bytes * n_columns // max(n_all, 1)

    def read(self, spans: Spans) -> Tensor:
        return self._files.read(self._name, spans)
