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

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # of the numbers that four bits may be, but for their sign
_BIAS = 127


def stored_tensors(name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Returns the tensors of bytes in which `name` is stored: blocks, then scales."""
    scales = (*shape[:-1], shape[-1] // BLOCK)
    return {f"{name}_blocks": (*scales, BLOCK // 2), f"{name}_scales": scales}


def blocks_of(columns: range) -> range:
    """Returns the blocks that numbers with these places in their row are in."""
    return range(columns.start // BLOCK, -(-columns.stop // BLOCK))


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers [..., n] of `dtype`, which is float32 or bfloat16.

    `blocks` [..., n / 32, 16] and `scales` [..., n / 32] are bytes.
    """
    halves = torch.tensor((*_HALVES, *(-half for half in _HALVES)), dtype=dtype)
    of_byte = torch.stack((halves.repeat(16), halves.repeat_interleave(16)), -1)  # [256, 2]
    # Two numbers are looked up as one: a byte's at once.
    pairs = of_byte.view(torch.int64 if dtype == torch.float32 else torch.int32).flatten()
    numbers = pairs.index_select(0, blocks.flatten().int()).view(dtype)
    # Half of each power, which for the largest is still a number.
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - (_BIAS + 1)).to(dtype)
    of_blocks = powers.index_select(0, scales.flatten().int())[:, None]
    shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
    return numbers.view(-1, BLOCK).mul_(of_blocks).view(shape)
