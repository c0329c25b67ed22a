"""Matrices in the blocks of GGUF files, of which some types are read without dequantising.

A row consists of blocks, one after the other. A block has one float16 scale, and in some types one
float16 minimum, for all numbers of the block. In the types whose names end in K, each part of a
block also has a scale and perhaps a minimum, stored as integers of a few bits. The float16 values
of the block multiply these integers. The layout of bytes follows the specification of ggml.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.weights.groups import MULTIPLE, WHOLE, Bits, GroupForm
from services.worker.models.gguf_file import GgufFile
from services.worker.models.stored_tensor import GroupedTensor, PlainTensor, Spans

_MIDDLE = -min(WHOLE)  # the middle of the values of four bits

# The value of each four-bit number in IQ4_NL.
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class _BlockType:
    """A type of blocks. The functions `numbers` and `scales` take the bytes of blocks, [n,
    n_bytes]."""

    bits: Bits
    size: int  # numbers in a block
    n_bytes: int
    group_size: int  # numbers that share a scale
    numbers: Callable[[Tensor], Tensor]  # [n, size], as `GroupedMatrix` has them
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]  # scales and offsets, [n, groups] each
    has_offsets: bool = False
    values: tuple[int, ...] = WHOLE


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at byte `at` of each block, [n, 1] in float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(pairs: Tensor) -> Tensor:
    """Returns the lower four bits of all bytes, then the upper four: [n, n_bytes] to [n, 2 *
    n_bytes]."""
    return torch.cat((pairs & 15, pairs >> 4), 1)


def _q4_0_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return _half(blocks, 0), None


def _q4_1_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = _half(blocks, 0)
    return scales, _half(blocks, 2) + _MIDDLE * scales


def _q4_k_numbers(blocks: Tensor) -> Tensor:
    # Each 32 bytes hold the numbers of two groups.
    return _nibbles(blocks[:, 16:].reshape(-1, 32)).view(len(blocks), 256)


def _q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the scales and offsets of the eight groups of each block.

    Twelve bytes hold eight scales and eight minimums of six bits. The lower six bits of the first
    four bytes are the scales of groups 0 to 3, and of the next four bytes the minimums of groups 0
    to 3. Each of the last four bytes has the lower four bits of a scale and of a minimum of groups
    4 to 7. Their upper two bits are the upper two bits of the first eight bytes.
    """
    first, second, third = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    of_groups = _half(blocks, 0) * scales
    return of_groups, _MIDDLE * of_groups - _half(blocks, 2) * minimums


def _q6_k_numbers(blocks: Tensor) -> Tensor:
    """Returns the numbers of blocks, [n, 256].

    For each 128 numbers, 64 bytes hold the lower four bits and 32 bytes hold the upper two bits.
    """
    lower = blocks[:, :128].reshape(-1, 64)
    upper = blocks[:, 128:192].reshape(-1, 32)
    quarters = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    return (_nibbles(lower) | quarters << 4).to(torch.int8).sub_(32).view(len(blocks), 256)


def _q6_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8), None


_TYPES: Mapping[str, _BlockType] = {
    "Q4_0": _BlockType(4, 32, 18, 32, lambda blocks: _nibbles(blocks[:, 2:]), _q4_0_scales),
    "Q4_1": _BlockType(4, 32, 20, 32, lambda blocks: _nibbles(blocks[:, 4:]), _q4_1_scales, True),
    "IQ4_NL": _BlockType(
        4,
        32,
        18,
        32,
        lambda blocks: _nibbles(blocks[:, 2:]),
        _q4_0_scales,
        values=_NON_LINEAR,
    ),
    "Q4_K": _BlockType(4, 256, 144, 32, _q4_k_numbers, _q4_k_scales, True),
    "Q6_K": _BlockType(8, 256, 210, 16, _q6_k_numbers, _q6_k_scales),
    "Q8_0": _BlockType(
        8, 32, 34, 32, lambda blocks: blocks[:, 2:].contiguous().view(torch.int8), _q4_0_scales
    ),
}


class GgufMatrix(PlainTensor, GroupedTensor):
    """A matrix in GGUF blocks, which is dequantised unless its type is in `_TYPES`."""

    def __init__(self, files: GgufFile, name: str) -> None:
        super().__init__(files, name)
        self._file = files
        self._type = _TYPES.get(files.block_type(name))
        self.has_offsets = self._type is not None and self._type.has_offsets

    def group_form(self, spans: Spans) -> GroupForm | None:
        if self._type is None:
            return None
        size = math.gcd(self._type.group_size, spans[1].start)
        return None if size % MULTIPLE else GroupForm(self._type.bits, size, self._type.values)

    def read_numbers(self, spans: Spans) -> Tensor:
        rows, columns = spans
        kind = self._known_type
        numbers = kind.numbers(self._blocks(kind, rows)).view(len(rows), -1)
        return numbers[:, columns.start : columns.stop]

    def read_scales(self, spans: Spans, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        rows, columns = spans
        kind = self._known_type
        scales, offsets = kind.scales(self._blocks(kind, rows))
        groups = torch.arange(columns.start, columns.stop, form.size) // kind.group_size
        found = scales.view(len(rows), -1)[:, groups]
        return found, None if offsets is None else offsets.view(len(rows), -1)[:, groups]

    @property
    def _known_type(self) -> _BlockType:
        if self._type is None:
            raise ValueError(f"{self._name} is not read as numbers")
        return self._type

    def _blocks(self, kind: _BlockType, rows: range) -> Tensor:
        """Returns the bytes of all blocks in the rows, one block after the other, [n, n_bytes]."""
        return self._file.read_blocks(self._name, rows).view(-1, kind.n_bytes)
