"""The structures that Python and the native library share.

The structure of a step is derived from the step's class in `kernels.steps`. It has the fields of
the class, in order. The declared type of a field determines its type in C++.

    declared type          field in C++
    int, bool, float       int64_t, int64_t, float; 0 for None
    Buffer                 Place: the number of the buffer; -1 for None
    Tensor                 Array: an address and an element type
    LinearWeight, Matrix,  Weight: a matrix as the library packs it
    TableWeight
    HeadProducts           HeadWeights: a matrix for each head
    Sequence[Expert]       Experts: the address and the number of the structures of the experts;
                           likewise for sequences of other classes
    another class          the structure of that class; all zeros for None

To add a field to such a class, add the field to the struct in `src/*_steps.h` as well, at the same
position. `kernels.native.layout` compares the classes with the structs when the library is loaded.
`kernels.native.fill` fills the structures.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from kernels.native.call import ELEMENT
from kernels.steps import Buffer, Matrix
from kernels.weights.head_products import HeadProducts
from kernels.weights.linear import LinearWeight, TableWeight

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

NUMBERS: dict[Any, Any] = {int: _int, bool: _int, float: _float, Buffer: _int}
MATRICES = (LinearWeight, TableWeight, Matrix)


class ArrayStruct(ctypes.Structure):
    """A dense tensor: the address of its data, and its element type."""

    _fields_ = (("data", _pointer), ("element", _int))


class WeightStruct(ctypes.Structure):
    """A matrix in panels. An int8 matrix has `starts` and `scales`. A matrix quantised in groups
    has the address of a `GroupsStruct` in `groups`. All other pointers are null."""

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


class StepStruct(ctypes.Structure):
    """A step: the index of the step's class in `STEPS`, and the address of its structure."""

    _fields_ = (("kind", _int), ("what", _pointer))


class BufferStruct(ctypes.Structure):
    """A buffer: its address, width and element type, and whether its rows are sampled tokens."""

    _fields_ = (("data", _pointer), ("width", _int), ("element", _int), ("is_of_sampled", _int))

    @classmethod
    def of(cls, buffer: Buffer, address: int) -> BufferStruct:
        """Returns the structure of `buffer`, whose memory begins at `address`."""
        element = ELEMENT.get(buffer.dtype, -1)
        return cls(address, buffer.width, element, buffer.is_of_sampled)


class GroupsStruct(ctypes.Structure):
    """The form of a matrix quantised in groups; `src/groups.h` describes the fields."""

    _fields_ = (
        ("bits", _int),
        ("size", _int),
        ("scale_bytes", _int),
        ("has_offsets", _int),
        ("rounds_inputs", _int),
        ("values", ctypes.c_int8 * 16),
    )


class AnglesStruct(ctypes.Structure):
    """The addresses of the tables of angles of one kind of rotary embedding."""

    _fields_ = (("cos", _pointer), ("sin", _pointer))


class LayerKVStruct(ctypes.Structure):
    """The storage of one layer: the addresses of its keys and values, or of the last inputs and the
    states of requests."""

    _fields_ = (("keys", _pointer), ("values", _pointer), ("block_size", _int), ("group", _int))


class StateSpansStruct(ctypes.Structure):
    """The columns of `kernels.forms.state_spans.StateSpans`, and the number `n` of spans."""

    _fields_ = (
        ("first_tokens", _pointer),
        ("n_tokens", _pointer),
        ("rows", _pointer),
        ("start_positions", _pointer),
        ("n", _int),
    )


class AdapterRowsStruct(ctypes.Structure):
    """The tensors of `kernels.forms.adapter_rows.AdapterRows`. The pointers are null if no row has
    an adapter."""

    _fields_ = (("rows", _pointer), ("begins", _pointer))


class BatchStruct(ctypes.Structure):
    """The arguments of one call of the library; `Batch` in `src/program.h` describes the fields."""

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
        ("adapters", AdapterRowsStruct),
        ("sampled_adapters", AdapterRowsStruct),
    )


class Seconds(ctypes.Structure):
    """Seconds that the runs of one `NativeProgram` have taken, for each kind of operation."""

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


SHARED: tuple[type[ctypes.Structure], ...] = (
    StepStruct,
    BatchStruct,
    BufferStruct,
    AnglesStruct,
    LayerKVStruct,
    GroupsStruct,
    Seconds,
)
"""The structures that are passed to the library by address and are not fields of steps."""


@cache
def structure_of(description: type) -> type[ctypes.Structure]:
    """Returns the class of the C structure that has the fields of the dataclass `description`."""
    fields = tuple((name, form_of(kind)) for name, kind in declared(description))
    return type(description.__name__, (ctypes.Structure,), {"_fields_": fields})


@cache
def sequence_of(description: type) -> type[ctypes.Structure]:
    """Returns the class of the C structure that describes an array: the address of the first
    element, and the number of elements. The elements are structures of the class `description`."""
    first = ctypes.POINTER(structure_of(description))
    fields = (("first", first), ("n", _int))
    return type(f"{description.__name__}s", (ctypes.Structure,), {"_fields_": fields})


@cache
def declared(description: type) -> tuple[tuple[str, Any], ...]:
    """Returns the name and the declared type of each field of a dataclass. The type of an optional
    field is returned without None."""
    hints = get_type_hints(description)
    return tuple((f.name, _without_none(hints[f.name])) for f in dataclasses.fields(description))


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType) or kind in MATRICES:
        return kind
    (kind,) = (each for each in get_args(kind) if each is not type(None))
    return kind


def form_of(kind: Any) -> Any:
    """Returns the ctypes type for a field that is declared as `kind`."""
    if kind is Tensor:
        return ArrayStruct
    if kind in MATRICES:
        return WeightStruct
    if kind is HeadProducts:
        return HeadWeightsStruct
    if get_origin(kind) is Sequence:
        return sequence_of(*get_args(kind))
    return NUMBERS.get(kind) or structure_of(kind)
