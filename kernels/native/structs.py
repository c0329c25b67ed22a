"""The structures that programs are for the library, and how they are filled.

Those of steps are derived from the classes of `kernels.steps`: a structure has the fields of its
class, in their order, each in the form of its declared type.

    declared type          field in C++
    int, bool, float       int64_t, int64_t, float; 0 for None
    Buffer                 Place: its number; -1 for None
    Tensor                 Array: where it is, and its element type
    LinearWeight, Matrix,  Weight: a matrix as the library packs it
    TableWeight
    HeadProducts           HeadWeights: one for each head
    Sequence[...]          a pointer to structures, and their number
    another class          the structure of that class; all zeros for None

So a field that is added to such a class is to be added to the struct in `src/*_steps.h`, in the
same place, and nowhere between. Structures hold addresses: whoever fills one keeps the tensors.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from kernels.head_products import HeadProducts
from kernels.linear_weight import LinearWeight, TableWeight
from kernels.native.call import ELEMENT
from kernels.native.groups import GroupPanels, NativeGated, NativeLinear
from kernels.native.linear import NO_GATE, NativeGatedWeight, NativeWeight
from kernels.steps import STEPS, Buffer, Matrix

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_NUMBERS: dict[Any, Any] = {int: _int, bool: _int, float: _float, Buffer: _int}
_MATRICES = (LinearWeight, TableWeight, Matrix)


class ArrayStruct(ctypes.Structure):
    """A dense tensor of a type that the library computes with."""

    _fields_ = (("data", _pointer), ("element", _int))


class WeightStruct(ctypes.Structure):
    """A matrix in panels; of int8 if there are scales, and in groups if their form is there."""

    _fields_ = (
        ("packed", _pointer),
        ("starts", _pointer),
        ("scales", _pointer),
        ("groups", _pointer),
        ("n_in", _int),
        ("n_out", _int),
        ("finish", _int),
    )


class HeadWeightsStruct(ctypes.Structure):
    """A matrix for each head, in panels."""

    _fields_ = (("packed", _pointer), ("n_heads", _int), ("n_out", _int), ("n_in", _int))


class SequenceStruct(ctypes.Structure):
    """Structures of one kind, one after the other."""

    _fields_ = (("first", _pointer), ("n", _int))


class StepStruct(ctypes.Structure):
    """One step: the number of its kind, and its structure."""

    _fields_ = (("kind", _int), ("what", _pointer))


class BufferStruct(ctypes.Structure):
    """Where a buffer lies, and its form."""

    _fields_ = (("data", _pointer), ("width", _int), ("element", _int), ("is_of_sampled", _int))

    @classmethod
    def of(cls, buffer: Buffer, address: int) -> BufferStruct:
        """Returns the structure of `buffer` with memory at `address`."""
        element = ELEMENT.get(buffer.dtype, -1)
        return cls(address, buffer.width, element, buffer.is_of_sampled)


class AnglesStruct(ctypes.Structure):
    """The angles of one kind of rotary embedding."""

    _fields_ = (("cos", _pointer), ("sin", _pointer))


class LayerKVStruct(ctypes.Structure):
    """The storage of one layer: keys and values, or the last inputs and the states of requests."""

    _fields_ = (("keys", _pointer), ("values", _pointer), ("block_size", _int), ("group", _int))


class StateSpansStruct(ctypes.Structure):
    """The spans of a batch whose layers keep states; `kernels.state_spans` says what they are."""

    _fields_ = (
        ("first_tokens", _pointer),
        ("n_tokens", _pointer),
        ("rows", _pointer),
        ("start_positions", _pointer),
        ("n", _int),
    )


class BatchStruct(ctypes.Structure):
    """The arguments of one call; `Batch` in `src/program.h` says what they are."""

    _fields_ = (
        ("buffers", _pointer),
        ("kv", _pointer),
        ("angles", _pointer),
        ("n_tokens", _int),
        ("ids", _pointer),
        ("positions", _pointer),
        ("slots", ctypes.POINTER(_pointer)),
        ("starts", _pointer),
        ("counts", _pointer),
        ("blocks", ctypes.POINTER(_pointer)),
        ("n_spans", _int),
        ("n_columns", _int),
        ("sampled", _pointer),
        ("n_sampled", _int),
        ("argmax", _pointer),
        ("max_ids", _int),
        ("max_positions", _int),
        ("states", StateSpansStruct),
    )


class Seconds(ctypes.Structure):
    """Seconds that the calls of one `NativeLayers` have taken, by kind of operation."""

    _fields_ = (
        ("linear", ctypes.c_double),
        ("attention", ctypes.c_double),
        ("sampling", ctypes.c_double),
        ("other", ctypes.c_double),
    )

    linear: float
    attention: float
    sampling: float
    other: float


def step_of(step: object, kept: list[object]) -> StepStruct:
    """Returns the structure of a step; those that it points to are added to `kept`."""
    what = filled(type(step), step, kept)
    kept.append(what)
    return StepStruct(STEPS.index(type(step)), ctypes.addressof(what))


@cache
def structure_of(description: type) -> type[ctypes.Structure]:
    """Returns the structure with the fields of the dataclass `description`."""
    fields = tuple((name, _form(kind)) for name, kind in _declared(description))
    return type(description.__name__, (ctypes.Structure,), {"_fields_": fields})


def filled(description: type, value: Any, kept: list[object]) -> ctypes.Structure:
    """Returns the structure of `description` with the fields of `value`, an instance of it.

    Structures that it points to are added to `kept`.
    """
    values = (_value(kind, getattr(value, name), kept) for name, kind in _declared(description))
    return structure_of(description)(*values)


@cache
def _declared(description: type) -> tuple[tuple[str, Any], ...]:
    """Returns the names of the fields of a dataclass and their declared types, less None."""
    hints = get_type_hints(description)
    return tuple((f.name, _without_none(hints[f.name])) for f in dataclasses.fields(description))


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType) or kind in _MATRICES:
        return kind
    (kind,) = (each for each in get_args(kind) if each is not type(None))
    return kind


def _form(kind: Any) -> Any:
    """Returns the type of a field that is declared as `kind`."""
    if kind is Tensor:
        return ArrayStruct
    if kind in _MATRICES:
        return WeightStruct
    if kind is HeadProducts:
        return HeadWeightsStruct
    if get_origin(kind) is Sequence:
        return SequenceStruct
    return _NUMBERS.get(kind) or structure_of(kind)


def _value(kind: Any, value: Any, kept: list[object]) -> Any:
    """Returns what the field of an attribute that is declared as `kind` holds."""
    if value is None:
        return -1 if kind is Buffer else _form(kind)()
    if kind is Buffer:
        return value.index
    if kind is Tensor:
        return ArrayStruct(value.data_ptr(), ELEMENT[value.dtype])
    if kind in _MATRICES:
        return _weight(value)
    if kind is HeadProducts:
        return HeadWeightsStruct(value.packed.data_ptr(), *value.shape)
    if get_origin(kind) is Sequence:
        (description,) = get_args(kind)
        return _sequence(description, value, kept)
    return value if kind in _NUMBERS else filled(kind, value, kept)


def _sequence(description: type, values: Sequence[Any], kept: list[object]) -> SequenceStruct:
    each = [filled(description, value, kept) for value in values]
    array = (structure_of(description) * len(each))(*each)
    kept.append(array)
    return SequenceStruct(ctypes.addressof(array), len(each))


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
