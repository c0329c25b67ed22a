"""The layout "pack-quantized" of compressed-tensors, in which outputs are the first dimension.

`weight_packed` [n_out, n_in / n] has the quantised numbers, with `n` numbers in each word.
`weight_scale` [n_out, n_groups] and `weight_zero_point` [n_out / n, n_groups] have the scales and
zero points of groups of inputs. The tensor `weight_g_idx` [n_in], if it exists, gives the group of
each input.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.weights.groups import GroupForm
from services.worker.models.quantised.matrix import (
    QuantisedMatrix,
    numbers_of,
    range_of,
    unpack,
    words_of,
)
from services.worker.models.stored_tensor import FLOATS, Spans


class PackedMatrix(QuantisedMatrix):
    """A matrix of "pack-quantized". Its signed numbers are stored as unsigned ones, by adding
    `middle`."""

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        packed_in = -(-self.n_in // self.per_word)
        n_scales = self._scales_shape()
        yield from self.wrong("weight_packed", (self.n_out, packed_in))
        yield from self.wrong("weight_scale", n_scales, FLOATS)
        if self.form.has_zeros:
            yield from self.wrong("weight_zero_point", self._zeros_shape())
        yield from self.wrong_order("weight_g_idx")
        wrong = list(self.wrong("weight_shape", (2,), frozenset(("I64", "I32"))))
        yield from wrong
        if not wrong:
            said = self.tensor("weight_shape", range(2)).tolist()
            if said != [self.n_out, self.n_in]:
                yield f"{self._module}.weight_shape is {said}, not {[self.n_out, self.n_in]}"

    def _scales_shape(self) -> tuple[int, ...]:
        return (1,) if self.form.block[0] is None else (self.n_out, self.n_groups)

    def _zeros_shape(self) -> tuple[int, ...]:
        n_rows, *n_groups = self._scales_shape()
        return -(-n_rows // self.per_word), *n_groups

    def read(self, spans: Spans) -> Tensor:
        rows, columns = spans
        numbers = self._numbers(rows, columns)
        if self.form.block[0] is None:
            return (numbers - self.middle) * self.tensor("weight_scale", range(1)).float()
        groups = self.groups(columns, "weight_g_idx")  # [n_columns]
        used = range_of(groups)
        groups = groups - used.start
        scales = self.tensor("weight_scale", rows, used).float()  # [n_rows, n_used]
        return (numbers - self._zeros(rows, used)[:, groups]) * scales[:, groups]

    def group_form(self, spans: Spans) -> GroupForm | None:
        return super().group_form(spans) if self.has_groups_in_order("weight_g_idx") else None

    def read_numbers(self, spans: Spans) -> Tensor:
        return self.as_values(self._numbers(*spans))

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        if self.form.block[0] is None:
            return self.tensor("weight_scale", range(1)).float().expand(len(rows), 1), None
        groups = self.groups(columns, "weight_g_idx")[:: form.size]
        used = range_of(groups)
        groups = groups - used.start
        scales = self.tensor("weight_scale", rows, used).float()[:, groups]
        zeros = self._zeros(rows, used)[:, groups]
        return scales, (self.middle - zeros) * scales if self.form.has_zeros else None

    def _numbers(self, rows: range, columns: range) -> Tensor:
        """Returns the unsigned numbers as stored, [n_rows, n_columns]."""
        words = self.tensor("weight_packed", rows, words_of(columns, self.form.bits))
        return numbers_of(unpack(words, self.form.bits), columns, self.form.bits)

    def _zeros(self, rows: range, groups: range) -> Tensor:
        """Returns the zero points as unsigned numbers, [n_rows, n_groups]. Like the numbers, they
        include `middle`."""
        if not self.form.has_zeros and any(self.wrong("weight_zero_point", self._zeros_shape())):
            return torch.full((len(rows), len(groups)), self.middle, dtype=torch.int32)
        words = self.tensor("weight_zero_point", words_of(rows, self.form.bits), groups)
        zeros = numbers_of(unpack(words.t(), self.form.bits), rows, self.form.bits).t()
        if not self.form.has_zeros:
            self.check_symmetric("weight_zero_point", zeros == self.middle)
        return zeros
