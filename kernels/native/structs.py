"""The structures that `src/layers.cpp` reads, and how they are filled.

Those of a stage's weights are derived from the classes of `kernels.layer`: a structure has the
fields of its class, in their order, each in the form of its declared type.

    declared type          field in C++
    int, float             int64_t, float; 0 for None
    Tensor                 Array: where it is, its element type, its length
    LinearWeight and       Weight: a matrix as the library packs it
      GatedWeight
    another class          the structure of that class; all zeros for None

So a field that is added to such a class is to be added to the struct of `layers.cpp`, in the same
place, and nowhere between. Structures hold addresses: whoever fills one keeps the tensors.
"""

from __future__ import annotations

import ctypes
import dataclasses
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from kernels.layer import Angles, HeadWeights, LayerWeights, StageWeights
from kernels.linear_weight import GatedWeight, LinearWeight
from kernels.native.call import ELEMENT
from kernels.native.groups import GroupPanels, NativeGated, NativeLinear
from kernels.native.linear import NO_GATE, NativeGatedWeight, NativeWeight

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_NUMBERS: dict[Any, Any] = {int: _int, float: _float}


class ArrayStruct(ctypes.Structure):
    """A dense tensor of a type that the library computes with."""

    _fields_ = (("data", _pointer), ("element", _int), ("length", _int))


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


@cache
def structure_of(description: type) -> type[ctypes.Structure]:
    """Returns the structure with the fields of the dataclass `description`."""
    fields = tuple((name, _form(kind)) for name, kind in _declared(description))
    return type(description.__name__, (ctypes.Structure,), {"_fields_": fields})


def filled(description: type, value: Any) -> ctypes.Structure:
    """Returns the structure of `description` with the fields of `value`, an instance of it.

    `value` may be of a derived class: what that has beside the declared fields stays outside.
    """
    values = (_value(kind, getattr(value, name)) for name, kind in _declared(description))
    return structure_of(description)(*values)


@cache
def _declared(description: type) -> tuple[tuple[str, Any], ...]:
    """Returns the names of the fields of a dataclass and their declared types, less None."""
    hints = get_type_hints(description)
    return tuple((f.name, _without_none(hints[f.name])) for f in dataclasses.fields(description))


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    (kind,) = (each for each in get_args(kind) if each is not type(None))
    return kind


def _form(kind: Any) -> Any:
    """Returns the type of a field that is declared as `kind`."""
    if kind is Tensor:
        return ArrayStruct
    if kind is LinearWeight or kind is GatedWeight:
        return WeightStruct
    return _NUMBERS.get(kind) or structure_of(kind)


def _value(kind: Any, value: Any) -> Any:
    """Returns what the field of an attribute that is declared as `kind` holds."""
    if value is None:
        return _form(kind)()
    if kind is Tensor:
        return _array(value)
    if kind is LinearWeight or kind is GatedWeight:
        return _weight(value)
    return value if kind in _NUMBERS else filled(kind, value)


def _array(tensor: Tensor | None) -> ArrayStruct:
    if tensor is None:
        return ArrayStruct()
    return ArrayStruct(tensor.data_ptr(), ELEMENT[tensor.dtype], len(tensor))


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


class StageStruct(ctypes.Structure):
    """A stage, which has as many layers as there are after the address of the first."""

    _fields_ = (
        ("element", _int),
        ("table", ArrayStruct),
        ("angles", structure_of(Angles)),
        ("head", structure_of(HeadWeights)),
        ("layers", _pointer),
        ("n_layers", _int),
    )

    kept: Any
    """The structures of the layers, which live as long as this one."""

    @classmethod
    def of(cls, stage: StageWeights, dtype: torch.dtype) -> StageStruct:
        """Returns the structure of `stage`, whose hidden states are of `dtype`."""
        layers = (structure_of(LayerWeights) * len(stage.layers))(
            *(filled(LayerWeights, layer) for layer in stage.layers)
        )
        struct = cls(
            ELEMENT[dtype],
            _array(stage.table),
            filled(Angles, stage.angles),
            structure_of(HeadWeights)() if stage.head is None else filled(HeadWeights, stage.head),
            ctypes.addressof(layers),
            len(layers),
        )
        struct.kept = layers
        return struct


class BatchStruct(ctypes.Structure):
    """The arguments of one call; `Batch` in `src/layers.cpp` says what they are."""

    _fields_ = (
        ("n_tokens", _int),
        ("ids", _pointer),
        ("positions", _pointer),
        ("slots", _pointer),
        ("starts", _pointer),
        ("counts", _pointer),
        ("blocks", _pointer),
        ("n_spans", _int),
        ("n_columns", _int),
        ("kv", _pointer),
        ("block_size", _int),
        ("hidden", _pointer),
        ("memory", _pointer),
        ("sampled", _pointer),
        ("n_sampled", _int),
        ("logits", _pointer),
        ("argmax", _pointer),
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
