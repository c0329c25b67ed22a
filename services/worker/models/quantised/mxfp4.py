"""The layout MXFP4: numbers of four bits, 32 of which share a power of two (OCP, 2023).

A checkpoint stores a tensor [..., n] as two tensors. `{name}_blocks` [..., n / 32, 16] has two
numbers in each byte, with the first number in the lower half. `{name}_scales` [..., n / 32] has
exponents plus 127. The dequantised numbers are bit-identical to the result of
`convert_moe_packed_tensors` in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.weights.groups import MULTIPLE, GroupForm
from services.worker.models.stored_tensor import GroupedTensor, Spans
from services.worker.models.tensor_files import TensorFiles
from services.worker.models.weights import pieces

BLOCK = 32
"""Number of elements that share a power of two."""

_STORED_BYTES = 17  # a block and its exponent
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values of three bits; the fourth bit is the sign
VALUES = (*_HALVES, *(-half for half in _HALVES))
"""Twice the value that each number of four bits stands for. The doubled values are integers."""

_BIAS = 127


class Mxfp4Tensor(GroupedTensor):
    """A tensor of any number of dimensions, stored in MXFP4. The size of the last dimension must be
    a multiple of `BLOCK`."""

    has_offsets = False

    def __init__(self, files: TensorFiles, name: str) -> None:
        self._files = files
        self._name = name

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        scales = (*shape[:-1], shape[-1] // BLOCK)
        yield from self._wrong(f"{self._name}_blocks", (*scales, BLOCK // 2))
        yield from self._wrong(f"{self._name}_scales", scales)

    def _wrong(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        found = self._files.find(name)
        if found is None:
            yield f"{name} is missing"
            return
        header = self._files.header(found)
        if header.shape != shape:
            yield f"{found} has shape {list(header.shape)}, not {list(shape)}"
        elif header.element != "U8":
            yield f"{found} has element type {header.element}"

    def pieces(self, spans: Spans) -> Iterator[Spans]:
        rows, *others = spans
        for begin, end in pieces(len(rows), self.n_bytes((range(1), *others))):
            yield (range(rows.start + begin, rows.start + end), *others)

    def n_bytes(self, spans: Spans) -> int:
        *outer, columns = spans
        return math.prod(map(len, outer)) * len(blocks_of(columns)) * _STORED_BYTES

    def read(self, spans: Spans) -> Tensor:
        *outer, columns = spans
        blocks = blocks_of(columns)
        scales = self._tensor("scales", (*outer, blocks))
        numbers = dequantised(self._tensor("blocks", (*outer, blocks, range(BLOCK // 2))), scales)
        return numbers.narrow(-1, columns.start - blocks.start * BLOCK, len(columns))

    def group_form(self, spans: Spans) -> GroupForm | None:
        size = math.gcd(BLOCK, spans[-1].start)
        return None if size % MULTIPLE else GroupForm(4, size, VALUES)

    def read_numbers(self, spans: Spans) -> Tensor:
        *outer, columns = spans
        blocks = blocks_of(columns)
        pairs = self._tensor("blocks", (*outer, blocks, range(BLOCK // 2)))
        numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-3)
        return numbers.narrow(-1, columns.start - blocks.start * BLOCK, len(columns))

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        *outer, columns = spans
        blocks = blocks_of(columns)
        places = torch.arange(columns.start, columns.stop, form.size) // BLOCK - blocks.start
        scales = self._tensor("scales", (*outer, blocks))[..., places].int()
        return torch.ldexp(torch.ones(scales.shape), scales - (_BIAS + 1)), None

    def _tensor(self, suffix: str, spans: Spans) -> Tensor:
        name = f"{self._name}_{suffix}"
        return self._files.read(self._files.find(name) or name, spans)


def blocks_of(columns: range) -> range:
    """Returns the range of blocks that contain `columns`."""
    return range(columns.start // BLOCK, -(-columns.stop // BLOCK))


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the dequantised numbers [..., n] in bfloat16. The result is exact unless a number is
    too large for bfloat16.

    `blocks` [..., n / 32, 16] and `scales` [..., n / 32] are bytes.
    """
    halves = torch.tensor(VALUES, dtype=torch.bfloat16)
    of_byte = torch.stack((halves.repeat(16), halves.repeat_interleave(16)), -1)  # [256, 2]
    # One look-up returns both numbers of a byte.
    pairs = of_byte.view(torch.int32).flatten()
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    # Half of each power of two, so that the largest is finite.
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - (_BIAS + 1)).bfloat16()
    of_blocks = powers.index_select(0, scales.flatten().int())[:, None]
    shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
    return numbers.view(-1, BLOCK).mul_(of_blocks).view(shape)
