"""The description of a type of GGUF blocks, and functions that read the fields of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.weights.groups import WHOLE, Bits

MIDDLE = -min(WHOLE)
"""The index of the value 0 among the default values of numbers of four bits."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks. The functions `numbers` and `scales` take the bytes of `n` blocks, [n,
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
    """Returns the float16 value at byte `at` of each block, converted to float32, [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(pairs: Tensor) -> Tensor:
    """Unpacks bytes into numbers of four bits: [n, n_bytes] to [n, 2 * n_bytes]. The lower halves
    of all bytes come first, then the upper halves."""
    return torch.cat((pairs & 15, pairs >> 4), 1)


def bytes_of_six(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks eight scales and eight minimums of six bits from twelve bytes, [n, 8] each.

    The lower six bits of the first four bytes are the scales of groups 0 to 3, and the lower six
    bits of the next four bytes are the minimums of groups 0 to 3. Each of the last four bytes has
    the lower four bits of a scale and of a minimum of groups 4 to 7. The upper two bits of these
    scales and minimums are the upper two bits of the first eight bytes.
    """
    first, second, third = stored.view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    return scales, torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)


def nibbles_in_order(stored: Tensor) -> Tensor:
    """Unpacks bytes into numbers of four bits: [n, n_bytes] to [n, 2 * n_bytes]. The lower half of
    each byte comes directly before its upper half."""
    return torch.stack((stored & 15, stored >> 4), -1).flatten(1)
