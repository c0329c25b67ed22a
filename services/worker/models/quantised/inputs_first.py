"""The layouts of GPTQ and AWQ, in which inputs are the first dimension.

`qweight` has the quantised numbers. `qzeros` [n_groups, n_out / n] and `scales` [n_groups, n_out]
have the zero points and scales of groups of inputs, where `n` is the number of numbers in a 32-bit
word; 32 numbers of 3 bits are in three words, one after the other.

The zero point of a symmetric matrix is the middle of the range. Its `qzeros` may be missing. If the
tensor exists, each of its numbers must be the middle, or the middle minus one, which the first
version of GPTQ stores and some writers store by mistake. The tensor `g_idx` [n_in] gives the group
of each input, unless it is missing or unset.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.weights.groups import GroupForm
from services.worker.models.quantised.matrix import (
    WORD_BITS,
    QuantisedMatrix,
    numbers_of,
    range_of,
    run_of,
    unpack,
    words_of,
)
from services.worker.models.stored_tensor import FLOATS, Spans
from services.worker.models.weights import pieces

# The place in a word of AWQ of each output, in the order of outputs.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class InputsFirst(QuantisedMatrix):
    """A matrix of GPTQ or AWQ. Both store inputs first, with scales [n_groups, n_out]."""

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        yield from self.wrong_numbers()
        run = run_of(self.form.bits)
        if self.n_out % run:
            yield f"{self._module}: {self.n_out} outputs do not fill words, which need {run}"
        if self.form.has_zeros:
            yield from self.wrong("qzeros", self._zeros_shape)
        yield from self.wrong("scales", (self.n_groups, self.n_out), FLOATS)
        yield from self.wrong_order("g_idx")

    def pieces(self, spans: Spans) -> Iterator[Spans]:
        rows, columns = spans
        for begin, end in pieces(len(columns), len(rows) * 4):
            yield rows, range(columns.start + begin, columns.start + end)

    def read(self, spans: Spans) -> Tensor:
        rows, columns = spans
        groups = self.groups(columns, "g_idx")  # [n_columns]
        used = range_of(groups)
        scales, zeros = self._scales_and_zeros(used, rows)
        groups = groups - used.start
        numbers = self.numbers(rows, columns)  # [n_columns, n_rows]
        return ((numbers - zeros[groups]) * scales[groups]).t()

    def group_form(self, spans: Spans) -> GroupForm | None:
        return super().group_form(spans) if self.has_groups_in_order("g_idx") else None

    def read_numbers(self, spans: Spans) -> Tensor:
        rows, columns = spans
        return self.as_values(self.numbers(rows, columns).t())

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        groups = self.groups(columns, "g_idx")[:: form.size]
        used = range_of(groups)
        scales, zeros = self._scales_and_zeros(used, rows)
        groups = groups - used.start
        if not self.form.has_zeros:
            return scales[groups].t(), None
        offsets = (self.middle - zeros) * scales
        return scales[groups].t(), offsets[groups].t()

    def _scales_and_zeros(self, groups: range, rows: range) -> tuple[Tensor, Tensor]:
        """Returns the scales and the zero points that the groups `groups` have for the outputs
        `rows`, [n_groups, n_rows] each."""
        scales = self.tensor("scales", groups, rows).float()
        if not self.form.has_zeros:
            if not any(self.wrong("qzeros", self._zeros_shape)):
                zeros = self.unpacked("qzeros", groups, rows)
                is_middle = (zeros == self.middle) | (zeros == self.middle - 1)
                self.check_symmetric("qzeros", is_middle)
            return scales, torch.full_like(scales, self.middle)
        zeros = self.unpacked("qzeros", groups, rows) + self.form.zero_offset
        return scales, zeros & (1 << self.form.bits) - 1

    @property
    def _zeros_shape(self) -> tuple[int, int]:
        return self.n_groups, self.n_out * self.form.bits // WORD_BITS

    def unpacked(self, suffix: str, rows: range, columns: range) -> Tensor:
        """Returns the unpacked numbers at the indices `rows` and `columns` of the tensor named
        `suffix`, [n_rows, n_columns]. A word of the tensor holds numbers of several columns."""
        words = self.tensor(suffix, rows, words_of(columns, self.form.bits))
        numbers = unpack(words, self.form.bits)
        return numbers_of(numbers, columns, self.form.bits)

    @abstractmethod
    def wrong_numbers(self) -> Iterator[str]:
        """Yields a description of each problem of the tensor `qweight`."""

    @abstractmethod
    def numbers(self, rows: range, columns: range) -> Tensor:
        """Returns the quantised numbers for the outputs `rows` and the inputs `columns`,
        [n_columns, n_rows]."""


class GptqMatrix(InputsFirst):
    """A matrix of GPTQ. Its words contain the numbers of consecutive inputs."""

    def wrong_numbers(self) -> Iterator[str]:
        bits, run = self.form.bits, run_of(self.form.bits)
        if self.n_in % run:
            yield f"{self._module}: {self.n_in} inputs do not fill words, which need {run}"
        yield from self.wrong("qweight", (self.n_in * bits // WORD_BITS, self.n_out))

    def numbers(self, rows: range, columns: range) -> Tensor:
        words = self.tensor("qweight", words_of(columns, self.form.bits), rows)
        return numbers_of(unpack(words.t(), self.form.bits), columns, self.form.bits).t()


class AwqMatrix(InputsFirst):
    """A matrix of AWQ. Its words contain the numbers of several outputs, in a permuted order."""

    def wrong_numbers(self) -> Iterator[str]:
        if self.n_in % self.group_size:  # AutoAWQ has whole groups only
            yield f"{self._module}: groups of {self.group_size} do not divide {self.n_in} inputs"
        yield from self.wrong("qweight", (self.n_in, self.n_out // self.per_word))

    def numbers(self, rows: range, columns: range) -> Tensor:
        return self.unpacked("qweight", columns, rows)

    def unpacked(self, suffix: str, rows: range, columns: range) -> Tensor:
        words = self.tensor(suffix, rows, words_of(columns, self.form.bits))
        numbers = unpack(words, self.form.bits)
        numbers = numbers.reshape(len(rows), numbers.shape[1] // self.per_word, self.per_word)
        ordered = numbers[:, :, list(_AWQ_PLACES)].flatten(1)
        return numbers_of(ordered, columns, self.form.bits)
