"""The types of GGUF blocks whose numbers have 1, 2, 3 or 5 bits, or are codes of several numbers.

The numbers of IQ1 to IQ3 come from tables of the package `gguf`. All types are read the same way:
the package dequantises blocks whose scales are replaced by ones (or by the smallest that the type
can store) and whose minimums are replaced by zeros. The result is the numbers times a constant.
This module reads the real scales and minimums itself.

Each number is one of at most sixteen values, and becomes a number of four bits. Numbers of 5 bits
have 32 values, and become numbers of eight bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kernels.weights.groups import WHOLE
from services.worker.models.quantised.gguf_block_type import (
    BlockType,
    bytes_of_six,
    half,
    nibbles_in_order,
)

_ONE = (0x00, 0x3C)  # the bytes of 1.0 in float16
_DELTA = 0.125  # added to or subtracted from all numbers of a group in IQ1

_Scales = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class _Numbers:
    """Reads the numbers of blocks of one type."""

    type: GGMLQuantizationType
    kept: tuple[int, ...]  # the bits of each byte of a block that are no scale
    ones: tuple[int, ...]  # the bits of the replaced scales
    factor: float  # that turns what is dequantised into whole numbers
    delta: float = 0.0  # to be subtracted first
    values: tuple[int, ...] | None = None  # of numbers of four bits; None for eight bits

    def __call__(self, blocks: Tensor) -> Tensor:
        """Returns the numbers of blocks [n, n_bytes] in the encoding of `GroupedMatrix`, [n,
        size]."""
        kept, ones = (torch.tensor(bits, dtype=torch.uint8) for bits in (self.kept, self.ones))
        dequantised = torch.from_numpy(dequantize((blocks & kept | ones).numpy(), self.type))
        whole = dequantised.sub_(self.delta).mul_(self.factor).to(torch.int8)
        return whole if self.values is None else self._places[whole.view(torch.uint8).int()]

    @cached_property
    def _places(self) -> Tensor:
        """A table [256] uint8 with the index in `values` of each number. The number, an int8, is
        looked up as an unsigned byte."""
        places = torch.zeros(256, dtype=torch.uint8)
        for place, value in enumerate(self.values or ()):
            places[value & 255] = place
        return places


def _code(
    name: str,
    group_size: int,
    scales: _Scales,
    kept: tuple[int, ...],
    ones: tuple[int, ...],
    *,
    factor: float = 1.0,
    delta: float = 0.0,
    values: tuple[int, ...] | None = WHOLE,
    has_offsets: bool = False,
) -> BlockType:
    number = GGMLQuantizationType[name]
    size, n_bytes = GGML_QUANT_SIZES[number]
    if len(kept) != n_bytes or len(ones) != n_bytes:
        raise ValueError(f"a block of {name} has {n_bytes} bytes")
    numbers = _Numbers(number, kept, ones, factor, delta, values)
    bits, shown = (8, WHOLE) if values is None else (4, values)
    return BlockType(
        4 if bits == 4 else 8, size, n_bytes, group_size, numbers, scales, has_offsets, shown
    )


def _signed(*sizes: int) -> tuple[int, ...]:
    """Returns sixteen values: the sizes, then the sizes with a minus sign, then zeros."""
    both = (*sizes, *(-size for size in sizes))
    return (*both, *(0,) * (16 - len(both)))


_GRID_2 = _signed(8, 25, 43)
_GRID_3_XXS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
_GRID_3_S = _signed(1, 3, 5, 7, 9, 11, 13, 15)


def _plain(at: int) -> _Scales:
    """Returns a function that reads the only scale of each block, at byte `at` of the block."""
    return lambda blocks: (half(blocks, at), None)


def _q5_1_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return half(blocks, 0), half(blocks, 2)


def _q5_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    scales, minimums = bytes_of_six(blocks[:, 4:16])
    return half(blocks, 0) * scales, -half(blocks, 2) * minimums


def _q2_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    stored = blocks[:, :16]
    return half(blocks, 80) * (stored & 15), -half(blocks, 82) * (stored >> 4)


def _q3_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the scales of the sixteen groups of each block. Eight bytes of a block hold the lower
    four bits of the scales, and four bytes hold the upper two bits."""
    lower, upper = blocks[:, 96:104], blocks[:, 104:108]
    twos = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    scales = torch.cat((lower & 15, lower >> 4), 1) | twos << 4
    return half(blocks, 108) * (scales.int() - 32), None


def _iq2_xxs_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = blocks[:, 2:].reshape(len(blocks), 8, 8)[:, :, 7] >> 4
    return half(blocks, 0) * (scales + 0.5) * 0.25, None


def _iq2_scales(at: int) -> _Scales:
    """Returns a function that reads the sixteen scales of each block of IQ2_XS or IQ2_S. The scales
    begin at byte `at` of a block."""

    def scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        return half(blocks, 0) * (nibbles_in_order(blocks[:, at:]) + 0.5) * 0.25, None

    return scales


def _iq3_xxs_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = blocks[:, 66:].reshape(len(blocks), 8, 4)[:, :, 3] >> 4
    return half(blocks, 0) * (scales + 0.5) * 0.5, None


def _iq3_s_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return half(blocks, 0) * (nibbles_in_order(blocks[:, 106:]) * 2.0 + 1), None


def _iq1_s_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    stored = blocks[:, 35::2]  # upper bytes of words: a scale of three bits and the sign of delta
    scales = half(blocks, 0) * ((stored >> 4 & 7) * 2.0 + 1)
    return scales, scales * torch.where(stored > 127, -_DELTA, _DELTA)


def _iq1_m_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the scales and offsets of groups of eight numbers. Two neighbouring groups share a
    scale.

    A block has four words. Their upper four bits together are the block's scale, and the lower
    twelve bits of each word are four scales of three bits.
    """
    words = blocks[:, 48:].contiguous().view(torch.int16).int() & 0xFFFF  # [n, 4]
    upper = torch.tensor((0, 4, 8, 12), dtype=torch.int32)
    joined = ((words >> 12) << upper).sum(1, keepdim=True).to(torch.int16)
    whole = joined.view(torch.float16).float()
    parts = words[:, :, None] >> torch.tensor((0, 3, 6, 9), dtype=torch.int32) & 7
    scales = (whole * (parts.flatten(1) * 2.0 + 1)).repeat_interleave(2, 1)
    signs = nibbles_in_order(blocks[:, 32:48]) & 8
    return scales, scales * torch.where(signs > 0, -_DELTA, _DELTA)


_ALL = 255
CODES: Mapping[str, BlockType] = {
    "Q5_0": _code(
        "Q5_0", 32, _plain(0), (0, 0, *(_ALL,) * 20), (*_ONE, *(0,) * 20), values=None
    ),
    "Q5_1": _code(
        "Q5_1", 32, _q5_1_scales, (*(0,) * 4, *(_ALL,) * 20), (*_ONE, *(0,) * 22),
        values=None, has_offsets=True,
    ),
    "Q5_K": _code(
        "Q5_K", 32, _q5_k_scales, (*(0,) * 16, *(_ALL,) * 160),
        (*_ONE, 0, 0, *(1,) * 4, *(0,) * 4, *(1,) * 4, *(0,) * 160),
        values=None, has_offsets=True,
    ),
    "Q2_K": _code(
        "Q2_K", 16, _q2_k_scales, (*(0,) * 16, *(_ALL,) * 64, *(0,) * 4),
        (*(1,) * 16, *(0,) * 64, *_ONE, 0, 0), has_offsets=True,
    ),
    "Q3_K": _code(
        "Q3_K", 16, _q3_k_scales, (*(_ALL,) * 96, *(0,) * 14),
        (*(0,) * 96, *(0x11,) * 8, *(0xAA,) * 4, *_ONE),
    ),
    "TQ1_0": _code("TQ1_0", 256, _plain(52), (*(_ALL,) * 52, 0, 0), (*(0,) * 52, *_ONE)),
    "TQ2_0": _code("TQ2_0", 256, _plain(64), (*(_ALL,) * 64, 0, 0), (*(0,) * 64, *_ONE)),
    "IQ2_XXS": _code(
        "IQ2_XXS", 32, _iq2_xxs_scales, (0, 0, *(*(_ALL,) * 7, 0x0F) * 8), (*_ONE, *(0,) * 64),
        factor=8.0, values=_GRID_2,
    ),
    "IQ2_XS": _code(
        "IQ2_XS", 16, _iq2_scales(66), (0, 0, *(_ALL,) * 64, *(0,) * 8), (*_ONE, *(0,) * 72),
        factor=8.0, values=_GRID_2,
    ),
    "IQ2_S": _code(
        "IQ2_S", 16, _iq2_scales(74), (0, 0, *(_ALL,) * 72, *(0,) * 8), (*_ONE, *(0,) * 80),
        factor=8.0, values=_GRID_2,
    ),
    "IQ3_XXS": _code(
        "IQ3_XXS", 32, _iq3_xxs_scales, (0, 0, *(_ALL,) * 64, *(*(_ALL,) * 3, 0x0F) * 8),
        (*_ONE, *(0,) * 96), factor=4.0, values=_GRID_3_XXS,
    ),
    "IQ3_S": _code(
        "IQ3_S", 32, _iq3_s_scales, (0, 0, *(_ALL,) * 104, *(0,) * 4), (*_ONE, *(0,) * 108),
        values=_GRID_3_S,
    ),
    "IQ1_S": _code(
        "IQ1_S", 32, _iq1_s_scales, (0, 0, *(_ALL,) * 32, *(_ALL, 0x0F) * 8), (*_ONE, *(0,) * 48),
        delta=_DELTA, has_offsets=True,
    ),
    "IQ1_M": _code(
        "IQ1_M", 8, _iq1_m_scales, (*(_ALL,) * 32, *(0x77,) * 16, *(0,) * 8),
        (*(0,) * 52, 0x00, 0xC0, 0x00, 0x30), delta=_DELTA, has_offsets=True,
    ),
}  # fmt: skip
"""The types of blocks in this module, by their names in GGUF."""
