"""What a type of blocks in GGUF files is, and how bytes of blocks are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.weights.groups import WHOLE, Bits

MIDDLE = -min(WHOLE)
"""The number of four bits whose default value is 0."""


@dataclass(frozen=True, slots=True)
class BlockType:
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


def half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at byte `at` of each block, [n, 1] in float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(pairs: Tensor) -> Tensor:
    """Returns the lower four bits of all bytes, then the upper four: [n, n_bytes] to [n, 2 *
    n_bytes]."""
    return torch.cat((pairs & 15, pairs >> 4), 1)


def bytes_of_six(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the eight scales and the eight minimums of six bits in twelve bytes, [n, 8] each.

    The lower six bits of the first four bytes are the scales of groups 0 to 3, and of the next four
    bytes the minimums of groups 0 to 3. Each of the last four bytes has the lower four bits of a
    scale and of a minimum of groups 4 to 7. Their upper two bits are the upper two bits of the
    first eight bytes.
    """
    first, second, third = stored.view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    return scales, torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)


def nibbles_in_order(stored: Tensor) -> Tensor:
    """Returns the lower and the upper four bits of each byte side by side, [n, n_bytes] to [n, 2 *
    n_bytes]."""
    return torch.stack((stored & 15, stored >> 4), -1).flatten(1)
