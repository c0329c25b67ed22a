"""The layouts of MLX, which quantises embeddings and routers too, and stacks experts.

`weight` [n_out, n_in * bits / 32] has numbers of 2 to 8 bits in words of 32 bits, one number after
the other from the lowest bits on; a number of 3, 5 or 6 bits may begin in one word and end in the
next. In the mode "affine", a weight is the number times `scales` plus `biases`, [n_out, n_groups]
each. In the modes "nvfp4" and "mxfp4", `scales` are bytes as in `fp4.py`, and there are no biases.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.weights.groups import WHOLE, GroupForm
from services.worker.models.quantised.fp4 import Fp4Matrix, PowersFp4Matrix
from services.worker.models.quantised.matrix import WORD_BITS, QuantisedMatrix, unpack_bytes
from services.worker.models.stored_tensor import FLOATS, Spans

_WORDS = frozenset(("U32",))
_BYTES = frozenset(("U8",))


class MlxMatrix(QuantisedMatrix):
    """A matrix of the mode "affine"."""

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        if self.n_in % self.group_size:
            yield f"{self._module}: {self.n_in} inputs do not fill groups of {self.group_size}"
        yield from self.wrong(
            "weight", (self.n_out, self.n_in * self.form.bits // WORD_BITS), _WORDS
        )
        yield from self.wrong("scales", (self.n_out, self.n_groups), FLOATS)
        yield from self.wrong("biases", (self.n_out, self.n_groups), FLOATS)

    def read(self, spans: Spans) -> Tensor:
        rows, columns = spans
        places = torch.arange(columns.start, columns.stop) // self.group_size
        groups = range(columns.start // self.group_size, -(-columns.stop // self.group_size))
        scales = self.tensor("scales", rows, groups).float()[:, places - groups.start]
        biases = self.tensor("biases", rows, groups).float()[:, places - groups.start]
        return self._numbers(rows, columns) * scales + biases

    def read_numbers(self, spans: Spans) -> Tensor:
        numbers = self._numbers(*spans)
        if self.form.bits <= 4:
            return (numbers - min(WHOLE) - self._shift).to(torch.uint8)
        return (numbers - self._shift).to(torch.int8)

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        groups = range(columns.start // self.group_size, -(-columns.stop // self.group_size))
        starts = torch.arange(columns.start, columns.stop, form.size)
        places = starts // self.group_size - groups.start
        scales = self.tensor("scales", rows, groups).float()[:, places]
        biases = self.tensor("biases", rows, groups).float()[:, places]
        return scales, biases + self._shift * scales

    @property
    def _shift(self) -> int:
        """The number that is subtracted from each stored number. Stored numbers have no sign, and
        those of 4 or 8 bits would otherwise be too large for a `GroupedMatrix`."""
        return self.middle if self.form.bits in (4, 8) else 0

    def _numbers(self, rows: range, columns: range) -> Tensor:
        """Returns the quantised numbers as the file stores them, [n_rows, n_columns] int64."""
        bits = self.form.bits
        first = columns.start // WORD_BITS  # of runs of 32 numbers, which fill `bits` words
        words = range(first * bits, -(-columns.stop // WORD_BITS) * bits)
        stored = self.tensor("weight", rows, words).contiguous().view(torch.uint8)
        numbers = unpack_bytes(stored, bits)
        skipped = columns.start - first * WORD_BITS
        return numbers[:, skipped : skipped + len(columns)]


class MlxNvfp4Matrix(Fp4Matrix):
    """A matrix of the mode "nvfp4"."""

    scales_name = "scales"
    factor_name = None
    scale_elements = _BYTES

    def _wrong_numbers(self) -> Iterator[str]:
        yield from self.wrong("weight", (self.n_out, self.n_in // 8), _WORDS)

    def _pairs(self, rows: range, pairs: range) -> Tensor:
        return _pairs_in_words(self, rows, pairs)

    def _scales(self, rows: range, groups: range) -> Tensor:
        stored = self.tensor("scales", rows, groups).contiguous()
        return stored.view(torch.float8_e4m3fn).float() * 0.5


class MlxMxfp4Matrix(PowersFp4Matrix):
    """A matrix of the mode "mxfp4"."""

    numbers_name = "weight"
    scales_name = "scales"

    def _wrong_numbers(self) -> Iterator[str]:
        yield from self.wrong("weight", (self.n_out, self.n_in // 8), _WORDS)

    def _pairs(self, rows: range, pairs: range) -> Tensor:
        return _pairs_in_words(self, rows, pairs)


def _pairs_in_words(matrix: QuantisedMatrix, rows: range, pairs: range) -> Tensor:
    """Returns bytes of the matrix, which hold two numbers each, [n_rows, n_pairs]."""
    words = range(pairs.start // 4, -(-pairs.stop // 4))
    stored = matrix.tensor("weight", rows, words).contiguous().view(torch.uint8)
    return stored[:, pairs.start - words.start * 4 :][:, : len(pairs)]
