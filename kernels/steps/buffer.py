"""What steps read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Buffer:
    """Numbers of every token of a batch, or of every sampled one, [n, width]."""

    index: int  # in the program
    width: int
    dtype: torch.dtype
    is_of_sampled: bool = False
