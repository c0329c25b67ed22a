"""Weights stored in MXFP4: numbers of four bits, 32 of which share a power of two (OCP, 2023).

Of a tensor [..., n] a checkpoint has `{name}_blocks` [..., n / 32, 16], bytes of two numbers with
the first one in the lower half, and `{name}_scales` [..., n / 32], powers counted from -127. They
are the same numbers as `convert_moe_packed_tensors` of `transformers` makes, to the bit.

Knows names and numbers, no files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 32
"""Numbers that share a power."""

STORED_BYTES = 17
"""Bytes of a block and its power."""

_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stored_tensors(name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Returns the tensors of bytes in which `name` is stored: blocks, then scales."""
    scales = (*shape[:-1], shape[-1] // BLOCK)
    return {f"{name}_blocks": (*scales, BLOCK // 2), f"{name}_scales": scales}


def blocks_of(columns: range) -> range:
    """Returns the blocks that numbers with these places in their row are in."""
    return range(columns.start // BLOCK, -(-columns.stop // BLOCK))


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers [..., n] of `dtype`, for `blocks` [..., n / 32, 16] and their `scales`
    [..., n / 32], both of bytes."""
    four_bits = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), dtype=dtype)
    of_byte = torch.stack((four_bits.repeat(16), four_bits.repeat_interleave(16)), -1)  # [256, 2]
    numbers = of_byte[blocks.int()].flatten(-2)  # [..., n / 32, 32]
    return torch.ldexp(numbers, scales.int()[..., None] - _BIAS).to(dtype).flatten(-2)
