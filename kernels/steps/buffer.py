"""Buffers: the two-dimensional arrays that the steps of a program read and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array [n, width] with a row for every token of a batch, or for every sampled token."""

    index: int  # the index of the buffer in the program
    width: int
    dtype: torch.dtype
    is_of_sampled: bool = False


def buffers_of(step: Any) -> Iterator[Buffer]:
    """Yields the buffers that a step reads or writes."""
    for field in dataclasses.fields(step):
        value = getattr(step, field.name)
        if isinstance(value, Buffer):
            yield value
        elif isinstance(value, Sequence):
            yield from (each for each in value if isinstance(each, Buffer))
