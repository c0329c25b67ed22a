"""Converts matrices that are packed for the native library to bytes for a file, and back.

Only matrices that are quantised in groups of inputs can be stored: quantising one costs ten times
as much as reading its packed form from a file. The bytes depend on `layout()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.native.groups import (
    GroupPanels,
    NativeGroupsGatedWeight,
    NativeGroupsWeight,
    functions_of,
)
from kernels.native.library import library
from kernels.native.linear import has_int8
from kernels.native.structs import GroupsStruct

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A packed matrix: its bytes [n_panels, n_groups, bytes of a group], and a description of its
    form that can be written as JSON."""

    packed: Tensor
    description: Mapping[str, Any]


def layout() -> str:
    """Returns a text that identifies the packed layout. Builds of the native library that pack in
    different ways, or that choose other forms of matrices, return different texts. The text is
    empty if there is no library."""
    loaded = library()
    if loaded is None:
        return ""
    return f"panels of {functions_of(loaded).panel}, products of int8: {has_int8()}"


def to_stored(matrix: object) -> StoredMatrix | None:
    """Returns the stored form of `matrix`, or None if matrices of its class cannot be stored."""
    if isinstance(matrix, NativeGroupsWeight):
        further: dict[str, Any] = {"dtype": str(matrix.dtype)}
    elif isinstance(matrix, NativeGroupsGatedWeight):
        further = {"gate": matrix.gate}
    else:
        return None
    panels = matrix.panels
    form = {"shape": list(matrix.shape), "form": bytes(panels.form).hex()}
    return StoredMatrix(panels.packed, {**form, **further})


def from_stored(stored: StoredMatrix) -> NativeGroupsWeight | NativeGroupsGatedWeight:
    """Returns the matrix that `to_stored` has converted to `stored`. The bytes are not copied.

    Raises:
        ValueError: there is no native library.
    """
    loaded = library()
    if loaded is None:
        raise ValueError("there is no native library")
    known, functions = stored.description, functions_of(loaded)
    form = GroupsStruct.from_buffer_copy(bytes.fromhex(known["form"]))
    panels = GroupPanels(stored.packed, form)
    n_out, n_in = known["shape"]
    if "gate" in known:
        return NativeGroupsGatedWeight(panels, (n_out, n_in), functions, known["gate"])
    return NativeGroupsWeight(panels, (n_out, n_in), _DTYPES[known["dtype"]], functions)
