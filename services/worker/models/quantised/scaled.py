"""The layout of int8 and FP8: `weight` [n_out, n_in], and a scale for each block of the matrix.

A block is the whole matrix, one output (a row), or a rectangle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.weights.groups import GroupForm
from services.worker.models.quantised.matrix import QuantisedMatrix
from services.worker.models.stored_tensor import FLOATS, Spans

_WHOLE, _FLOAT = frozenset(("I8",)), frozenset(("F8_E4M3",))
_INVERSE = "weight_scale_inv"  # a factor nevertheless
QUANTISED = _WHOLE | _FLOAT
"""Element types that the tensor `weight` of such a matrix may have."""


class ScaledMatrix(QuantisedMatrix):
    """A matrix of int8 or FP8, with a scale for each block."""

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        yield from self.wrong("weight", shape, _FLOAT if self.form.is_float else _WHOLE)
        yield from self._wrong_scales(self._scale_name, FLOATS)
        if self.form.has_zeros:
            yield from self._wrong_zeros()

    def _wrong_zeros(self) -> Iterator[str]:
        return self._wrong_scales("weight_zero_point", frozenset(("I8", "I32")) | FLOATS)

    def _wrong_scales(self, suffix: str, elements: frozenset[str]) -> Iterator[str]:
        header = self._header(suffix)
        grid = self._grid
        # A file may leave out dimensions of size one, but not exchange them.
        is_whole = header is not None and header.shape in (grid, (*_without_ones(grid),))
        is_scalar = header is not None and math.prod(grid) == 1 and header.shape in ((), (1,))
        if header is None or not (is_whole or is_scalar):
            yield from self.wrong(suffix, grid, elements)
        elif header.element not in elements:
            yield f"{self._module}.{suffix} has element type {header.element}"

    @property
    def _scale_name(self) -> str:
        """The name of the tensor of scales: the name in the format, or `weight_scale_inv` if the
        files have only that tensor. `transformers` writes this name for FP8 also if a matrix has
        one scale, while AutoFP8 writes the name in the format."""
        name = self.form.scale_name
        is_other = self._header(name) is None and self._header(_INVERSE) is not None
        return _INVERSE if self.form.is_float and is_other else name

    @property
    def _block(self) -> tuple[int, int]:
        """The number of outputs and the number of inputs that share a scale."""
        return self.form.block[0] or max(self.n_out, 1), self.group_size

    @property
    def _grid(self) -> tuple[int, int]:
        """The shape of the tensor of scales. Files may leave out dimensions of size one."""
        return -(-self.n_out // self._block[0]), self.n_groups

    def n_bytes(self, spans: Spans) -> int:
        return len(spans[0]) * len(spans[1])

    def read(self, spans: Spans) -> Tensor:
        rows, columns = spans
        weight = self.tensor("weight", rows, columns).float()
        if self._has_zeros(rows, columns):
            weight -= self._spread("weight_zero_point", rows, columns)
        return weight.mul_(self._scales(rows, columns))

    def group_form(self, spans: Spans) -> GroupForm | None:
        """Returns for int8 what `QuantisedMatrix.group_form` returns, which may be None. Returns
        None for FP8, which is always dequantised."""
        header = self._header("weight")
        is_int8 = header is not None and header.element == "I8"
        return super().group_form(spans) if is_int8 else None

    def read_numbers(self, spans: Spans) -> Tensor:
        return self.tensor("weight", *spans)

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        shape = len(rows), form.n_groups(len(columns))
        scales = self._scales(rows, columns)[:, :: form.size].expand(shape)
        if not self._has_zeros(rows, columns):
            return scales, None
        zeros = self._spread("weight_zero_point", rows, columns)[:, :: form.size]
        return scales, -zeros * scales

    def _has_zeros(self, rows: range, columns: range) -> bool:
        """Returns whether the matrix has zero points, as the settings say. If the settings say that
        it has none, but the file has zero points nevertheless, checks that they are 0.

        Raises:
            CheckpointError: a symmetric matrix has a zero point other than 0.
        """
        if not self.form.has_zeros and not any(self._wrong_zeros()):
            zeros = self._spread("weight_zero_point", rows, columns)
            self.check_symmetric("weight_zero_point", zeros == 0)
        return self.form.has_zeros

    def _scales(self, rows: range, columns: range) -> Tensor:
        """Returns the scale of each element, in a shape that broadcasts to [n_rows, n_columns]."""
        return self._spread(self._scale_name, rows, columns)

    def _spread(self, suffix: str, rows: range, columns: range) -> Tensor:
        """Returns the scale or zero point of each element. The shape is [n_rows, n_columns], or
        broadcasts to it."""
        by_row, by_column = self._block
        used = (
            range(rows.start // by_row, -(-rows.stop // by_row)),
            range(columns.start // by_column, -(-columns.stop // by_column)),
        )
        header = self._header(suffix)
        kept: tuple[range, ...] = used
        if header is not None and len(header.shape) < 2:
            # Dimensions of size one are missing. If both are, the tensor has shape [1] or [].
            is_long = [size != 1 for size in self._grid]
            kept = tuple(span for span, keeps in zip(used, is_long, strict=True) if keeps)
            if not kept and header.shape:
                kept = (range(1),)
        found = self.tensor(suffix, *kept).float().reshape(len(used[0]), len(used[1]))
        row_blocks = torch.arange(rows.start, rows.stop) // by_row - used[0].start
        if len(used[1]) > 1:
            column_blocks = torch.arange(columns.start, columns.stop) // by_column - used[1].start
            found = found[:, column_blocks]
        return found[row_blocks]


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
