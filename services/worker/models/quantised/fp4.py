"""Layouts of four-bit floating-point numbers with one bit of mantissa (E2M1): NVFP4 and MXFP4.

Each byte has two numbers, with the first number in the lower half. A group of 16 or 32 inputs has a
scale. In NVFP4 the scale is a number of eight bits (E4M3), and one more factor is common to the
whole matrix. In MXFP4 the scale is a power of two. `mxfp4.py` has the layout of gpt-oss, whose
tensors hold all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.weights.groups import GroupForm
from services.worker.models.quantised.matrix import QuantisedMatrix
from services.worker.models.quantised.mxfp4 import VALUES
from services.worker.models.stored_tensor import Spans

_BIAS = 127  # of the exponents of MXFP4
_E4M3 = frozenset(("F8_E4M3",))
_BYTES = frozenset(("U8",))


class Fp4Matrix(QuantisedMatrix):
    """A matrix of NVFP4 as ModelOpt stores it: `weight`, `weight_scale`, and the common factor
    `weight_scale_2`."""

    numbers_name = "weight"
    scales_name = "weight_scale"
    factor_name: str | None = "weight_scale_2"
    scale_elements = _E4M3

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        if self.n_in % self.group_size:
            yield f"{self._module}: {self.n_in} inputs do not fill groups of {self.group_size}"
        yield from self._wrong_numbers()
        yield from self.wrong(self.scales_name, (self.n_out, self.n_groups), self.scale_elements)
        yield from self._wrong_factor()

    def read(self, spans: Spans) -> Tensor:
        rows, columns = spans
        values = torch.tensor(VALUES, dtype=torch.float32)
        numbers = values[self.read_numbers(spans).int()]
        groups = self._groups(columns)
        places = torch.arange(columns.start, columns.stop) // self.group_size - groups.start
        return numbers.mul_(self._scales(rows, groups)[:, places])

    def group_form(self, spans: Spans) -> GroupForm | None:
        form = super().group_form(spans)
        return form and GroupForm(4, form.size, VALUES)

    def read_numbers(self, spans: Spans) -> Tensor:
        rows, columns = spans
        pairs = self._pairs(rows, range(columns.start // 2, -(-columns.stop // 2)))
        numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
        return numbers[:, columns.start % 2 :][:, : len(columns)]

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        groups = self._groups(columns)
        starts = torch.arange(columns.start, columns.stop, form.size)
        return self._scales(rows, groups)[:, starts // self.group_size - groups.start], None

    def _groups(self, columns: range) -> range:
        """Returns the range of scale groups that contain the inputs `columns`."""
        return range(columns.start // self.group_size, -(-columns.stop // self.group_size))

    def _wrong_numbers(self) -> Iterator[str]:
        yield from self.wrong(self.numbers_name, (self.n_out, self.n_in // 2), _BYTES)

    def _wrong_factor(self) -> Iterator[str]:
        if self.factor_name is None:
            return
        header = self._header(self.factor_name)
        is_one = header is not None and header.shape in ((), (1,))
        if not is_one or header is None or header.element != "F32":
            yield from self.wrong(self.factor_name, (1,), frozenset(("F32",)))

    def _pairs(self, rows: range, pairs: range) -> Tensor:
        """Returns bytes of two numbers each, [n_rows, n_pairs]."""
        return self.tensor(self.numbers_name, rows, pairs)

    def _scales(self, rows: range, groups: range) -> Tensor:
        """Returns half of each group's scale, [n_rows, n_groups], because the numbers are read as
        twice their value."""
        return self.tensor(self.scales_name, rows, groups).float() * (0.5 * self._factor())

    def _factor(self) -> Tensor:
        """Returns the factor by which all scales of the matrix are multiplied."""
        if self.factor_name is None:
            return torch.ones(())
        header = self._header(self.factor_name)
        spans = (range(1),) if header is not None and header.shape else ()
        return self.tensor(self.factor_name, *spans).float().reshape(())


class PackedFp4Matrix(Fp4Matrix):
    """A matrix of NVFP4 in the layout of compressed-tensors. Here scales are divided by the common
    factor, not multiplied."""

    numbers_name = "weight_packed"
    factor_name = "weight_global_scale"

    def _factor(self) -> Tensor:
        factor = super()._factor()
        # An infinite divisor stays, as a scale that is not finite: it would make all weights zero.
        return torch.where(factor.isinf(), factor, 1 / factor)


class PowersFp4Matrix(Fp4Matrix):
    """A matrix of MXFP4 as compressed-tensors stores it."""

    numbers_name = "weight_packed"
    factor_name = None
    scale_elements = _BYTES

    def _scales(self, rows: range, groups: range) -> Tensor:
        exponents = self.tensor(self.scales_name, rows, groups).int()
        return torch.ldexp(torch.ones(exponents.shape), exponents - (_BIAS + 1))
