"""The types of blocks in GGUF files: their numbers, and the scales and offsets of groups.

A block has a float16 scale, and in some types a float16 minimum, for all its numbers. In most types
of 256 numbers, each part of a block also has a scale and perhaps a minimum. These are integers of a
few bits, and are multiplied by the block's float16 scale and minimum. The layout of bytes follows
the specification of ggml.

The numbers are converted to four or eight bits, without rounding: numbers of 1, 2 or 3 bits become
numbers of four bits, and numbers of 5 bits become numbers of eight bits. `gguf_codes.py` has these
types.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.models.quantised.gguf_block_type import (
    MIDDLE,
    BlockType,
    bytes_of_six,
    half,
    nibbles,
    nibbles_in_order,
)
from services.worker.models.quantised.gguf_codes import CODES
from services.worker.models.quantised.mxfp4 import VALUES

# The value of each four-bit number in IQ4_NL and IQ4_XS.
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _q4_0_numbers(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 2:])


def _q4_0_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return half(blocks, 0), None


def _q4_1_numbers(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:])


def _q4_1_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = half(blocks, 0)
    return scales, half(blocks, 2) + MIDDLE * scales


def _q4_k_numbers(blocks: Tensor) -> Tensor:
    # Each 32 bytes hold the numbers of two groups.
    return nibbles(blocks[:, 16:].reshape(-1, 32)).view(len(blocks), 256)


def _q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    scales, minimums = bytes_of_six(blocks[:, 4:16])
    of_groups = half(blocks, 0) * scales
    return of_groups, MIDDLE * of_groups - half(blocks, 2) * minimums


def _q6_k_numbers(blocks: Tensor) -> Tensor:
    """Returns the 256 numbers of each Q6_K block, [n, 256].

    For each 128 numbers, 64 bytes hold the lower four bits and 32 bytes hold the upper two bits.
    """
    lower = blocks[:, :128].reshape(-1, 64)
    upper = blocks[:, 128:192].reshape(-1, 32)
    quarters = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    return (nibbles(lower) | quarters << 4).to(torch.int8).sub_(32).view(len(blocks), 256)


def _q6_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8), None


def _q8_0_numbers(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8)


def _iq4_xs_numbers(blocks: Tensor) -> Tensor:
    # Each 16 bytes hold the numbers of a group.
    return nibbles(blocks[:, 8:].reshape(-1, 16)).view(len(blocks), 256)


def _iq4_xs_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the scales of the eight groups of each block. Two bytes of a block hold the upper two
    bits of the scales, and four bytes hold their lower four bits."""
    upper = torch.cat([blocks[:, 2:4, None] >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    scales = nibbles_in_order(blocks[:, 4:8]) | upper << 4
    return half(blocks, 0) * (scales.int() - 32), None


def _mxfp4_numbers(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 1:])


def _mxfp4_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    exponents = blocks[:, :1].int()
    return torch.ldexp(torch.ones(exponents.shape), exponents - 128), None


def _nvfp4_numbers(blocks: Tensor) -> Tensor:
    # Each 8 bytes hold the numbers of a group.
    return nibbles(blocks[:, 4:].reshape(-1, 8)).view(len(blocks), 64)


def _nvfp4_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    stored = blocks[:, :4]
    scales = (stored & 127).contiguous().view(torch.float8_e4m3fn).float()
    return torch.where(stored & 127 == 127, 0.0, scales) / 2, None


TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(4, 32, 18, 32, _q4_0_numbers, _q4_0_scales),
    "Q4_1": BlockType(4, 32, 20, 32, _q4_1_numbers, _q4_1_scales, True),
    "Q4_K": BlockType(4, 256, 144, 32, _q4_k_numbers, _q4_k_scales, True),
    "Q6_K": BlockType(8, 256, 210, 16, _q6_k_numbers, _q6_k_scales),
    "Q8_0": BlockType(8, 32, 34, 32, _q8_0_numbers, _q4_0_scales),
    "IQ4_NL": BlockType(4, 32, 18, 32, _q4_0_numbers, _q4_0_scales, values=_NON_LINEAR),
    "IQ4_XS": BlockType(4, 256, 136, 32, _iq4_xs_numbers, _iq4_xs_scales, values=_NON_LINEAR),
    "MXFP4": BlockType(4, 32, 17, 32, _mxfp4_numbers, _mxfp4_scales, values=VALUES),
    "NVFP4": BlockType(4, 64, 36, 16, _nvfp4_numbers, _nvfp4_scales, values=VALUES),
    **CODES,
}
"""The types of blocks that can stay quantised, by their names in GGUF."""
