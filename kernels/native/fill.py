"""Fills the C structures of a program's steps, which the native library reads.

A structure holds addresses, which do not keep the memory alive. So the caller must keep a reference
to the step and to the list `kept`. The functions append to this list all structures to which other
structures point.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from torch import Tensor

from kernels.native.call import ELEMENT, NO_GATE
from kernels.native.groups import GroupPanels, NativeGated, NativeLinear
from kernels.native.linear import NativeGatedWeight, NativeWeight
from kernels.native.structs import (
    MATRICES,
    NUMBERS,
    ArrayStruct,
    HeadWeightsStruct,
    StepStruct,
    WeightStruct,
    declared,
    form_of,
    sequence_of,
    structure_of,
)
from kernels.steps import STEPS, Buffer
from kernels.weights.head_products import HeadProducts


def step_of(step: object, kept: list[object]) -> StepStruct:
    """Returns the C structure of a step. All structures to which it points are appended to `kept`,
    so that they stay alive."""
    what = _filled(type(step), step, kept)
    kept.append(what)
    return StepStruct(STEPS.index(type(step)), ctypes.addressof(what))


def _filled(description: type, value: Any, kept: list[object]) -> ctypes.Structure:
    """Returns the C structure that belongs to the class `description`, filled from the instance
    `value`. All structures to which it points are appended to `kept`."""
    values = (_value(kind, getattr(value, name), kept) for name, kind in declared(description))
    return structure_of(description)(*values)


def _value(kind: Any, value: Any, kept: list[object]) -> Any:
    """Converts the Python attribute `value` to the value of a C structure's field. `kind` is the
    declared type of the attribute. All structures to which the value points are appended to
    `kept`."""
    if value is None:
        return -1 if kind is Buffer else form_of(kind)()
    if kind is Buffer:
        return value.index
    if kind is Tensor:
        return ArrayStruct(value.data_ptr(), ELEMENT[value.dtype])
    if kind in MATRICES:
        return _weight(value)
    if kind is HeadProducts:
        return HeadWeightsStruct(value.packed.data_ptr(), *value.shape)
    if get_origin(kind) is Sequence:
        (description,) = get_args(kind)
        return _sequence(description, value, kept)
    return value if kind in NUMBERS else _filled(kind, value, kept)


def _sequence(description: type, values: Sequence[Any], kept: list[object]) -> ctypes.Structure:
    each = [_filled(description, value, kept) for value in values]
    array = (structure_of(description) * len(each))(*each)
    kept.append(array)
    return sequence_of(description)(array, len(each))


def _weight(weight: NativeLinear | NativeGated) -> WeightStruct:
    n_out, n_in = weight.shape
    finish = weight.gate if isinstance(weight, NativeGated) else NO_GATE
    if isinstance(weight, NativeWeight | NativeGatedWeight):
        return WeightStruct(weight.packed.data_ptr(), None, None, None, n_in, n_out, finish)
    panels = weight.panels
    if isinstance(panels, GroupPanels):
        packed, form = panels.packed.data_ptr(), panels.form_address
        return WeightStruct(packed, None, None, form, n_in, n_out, finish)
    addresses = (each.data_ptr() for each in (panels.packed, panels.starts, panels.scales))
    return WeightStruct(*addresses, None, n_in, n_out, finish)
