"""Finds the matrix of one expert in checkpoints that store all experts of a layer in one tensor.

Files of some families have `experts.gate_up_proj` [n_experts, 2 * size, hidden], with the gates
before the values that they multiply, and `experts.down_proj` [n_experts, hidden, size]. Files of
MLX have `switch_mlp.gate_proj.weight` [n_experts, size, hidden] and so on, which may be quantised.
Other files have a separate matrix for each expert: `experts.7.gate_proj.weight` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import Tensor

from services.worker.models.stored_tensor import FLOATS, Spans, StoredTensor
from services.worker.models.tensor_files import Header, TensorFiles, TensorFilesView
from services.worker.models.weights import pieces

_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<kind>gate|up|down)_proj\.weight"
)

_MLX_EXPERT = re.compile(
    r"(?P<mlp>.*)\.experts\.(?P<index>\d+)\.(?P<kind>(?:gate|up|down)_proj|w[123])\.weight"
)
_MLX_KINDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def find_mlx_expert(files: TensorFiles, name: str) -> tuple[TensorFiles, str] | None:
    """Finds one expert's tensor `name` in the stacks of MLX. Returns an object that reads slices of
    stacks as the tensors of this expert, and the stack's name. Returns None if the files have no
    such stack."""
    said = _MLX_EXPERT.fullmatch(name)
    if said is None:
        return None
    kind = _MLX_KINDS.get(said["kind"], said["kind"])
    found = files.find(f"{said['mlp']}.switch_mlp.{kind}.weight")
    return None if found is None else (_OneExpert(files, int(said["index"])), found)


class _OneExpert(TensorFilesView):
    """Reads one expert's slices: each tensor [n_experts, ...] of the files is seen as the tensor
    [...] of this expert."""

    def __init__(self, files: TensorFiles, index: int) -> None:
        super().__init__(files)
        self._index = index

    def header(self, name: str) -> Header:
        whole = self._files.header(name)
        if not whole.shape or whole.shape[0] <= self._index:
            return Header((), f"{whole.element} without expert {self._index}", 0)
        n_rows = max(whole.shape[1], 1) if len(whole.shape) > 1 else 1
        return Header(whole.shape[1:], whole.element, whole.row_bytes // n_rows)

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        return self._files.read(name, (range(self._index, self._index + 1), *spans))[0]


def find_expert(files: TensorFiles, name: str) -> StoredTensor | None:
    """Returns an expert's matrix `name` as a slice of the tensor of all experts, or None if the
    files have no such tensor."""
    said = _EXPERT.fullmatch(name)
    if said is None:
        return None
    stack = "down_proj" if said["kind"] == "down" else "gate_up_proj"
    found = files.find(f"{said['experts']}.{stack}")
    return None if found is None else _StackedExpert(files, found, int(said["index"]), said["kind"])


class _StackedExpert(StoredTensor):
    """A matrix [n_out, n_in] of one expert. It is a slice of a stored tensor of floats that holds
    all experts."""

    def __init__(self, files: TensorFiles, stack: str, index: int, kind: str) -> None:
        self._files = files
        self._stack = stack
        self._index = index
        self._header = files.header(stack)
        self._n_parts = 1 if kind == "down" else 2  # matrices of one expert in this tensor
        self._part = 1 if kind == "up" else 0

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        n_out, n_in = shape
        stored, expected = self._header.shape, (self._n_parts * n_out, n_in)
        if stored[1:] != expected or stored[0] <= self._index:
            yield (
                f"{self._stack} has shape {list(stored)}, without a matrix {list(expected)} of "
                f"expert {self._index}"
            )
        elif self._header.element not in FLOATS:
            yield f"{self._stack} has element type {self._header.element}"

    def pieces(self, spans: Spans) -> Iterator[Spans]:
        rows, columns = spans
        for begin, end in pieces(len(rows), self._row_bytes):
            yield range(rows.start + begin, rows.start + end), columns

    def n_bytes(self, spans: Spans) -> int:
        rows, columns = spans
        return len(rows) * self._row_bytes * len(columns) // max(self._header.shape[2], 1)

    def read(self, spans: Spans) -> Tensor:
        rows, columns = spans
        first = self._part * self._header.shape[1] // self._n_parts
        shifted = range(first + rows.start, first + rows.stop)
        expert = range(self._index, self._index + 1)
        return self._files.read(self._stack, (expert, shifted, columns))[0]

    @property
    def _row_bytes(self) -> int:
        return self._header.row_bytes // max(self._header.shape[1], 1)
