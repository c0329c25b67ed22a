"""The tensors in the content of a safetensors file that is in memory.

The library safetensors copies the values of all tensors. This module reads the values
in place, so that a large file is in memory only once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

N_LENGTH_BYTES = 8
"""Number of bytes of the header's length, at the beginning of the file."""

MAX_HEADER_BYTES = 16 << 20
"""Largest length of a header: enough for 100,000 tensors."""

ELEMENT_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Sizes of the element types that are served, in bytes."""


@dataclass(frozen=True, slots=True)
class StoredValues:
    """The shape, the element type and the bytes of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    data: memoryview


def stored_values(content: bytes) -> dict[str, StoredValues]:
    """Returns the tensors in the content of a file, by their names. Raises ValueError if the
    content is broken, or a tensor has a type that is not served."""
    values = memoryview(content)
    length = int.from_bytes(values[:N_LENGTH_BYTES], "little")
    start = N_LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or start > len(values):
        raise ValueError("cannot be read: its header has a wrong length")
    try:
        header = json.loads(bytes(values[N_LENGTH_BYTES:start]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("cannot be read: its header is no JSON object")
    header.pop("__metadata__", None)
    found, spans = {}, []
    for key, entry in header.items():
        dtype, shape, (begin, end) = _checked(key, entry)
        found[key] = StoredValues(shape, dtype, values[start + begin : start + end])
        spans.append((begin, end))
    _check_spans(spans, len(values) - start)
    return found


def _checked(key: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Returns the element type, the shape and the range of bytes of the tensor `key`. Raises
    ValueError if its `entry` in the header is invalid."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError(f"cannot be read: the header has no tensor under {key}")
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"{key} has element type {dtype}")
    if any(type(one) is not int or one < 0 for one in (*shape, begin, end)):
        raise ValueError(f"cannot be read: the header has wrong numbers for {key}")
    if end - begin != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise ValueError(f"cannot be read: the range of {key} does not have the tensor's size")
    return dtype, tuple(shape), (begin, end)


def _check_spans(spans: list[tuple[int, int]], n_bytes: int) -> None:
    """Raises ValueError unless the ranges of all tensors cover every byte after the header exactly
    once."""
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ValueError("cannot be read: the ranges of its tensors overlap or leave gaps")
        at = end
    if at != n_bytes:
        raise ValueError("cannot be read: it does not end with its last tensor")
