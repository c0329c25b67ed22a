"""Compares the structures and numbers that Python shares with the native library.

Structures and numbers are written twice, in Python and in C++. A field at another offset would make
the library read memory at wrong addresses. So the library contains a text that describes the layout
of its structs, with offsets from the compiler (`src/layout.h`). When the library is loaded, each
line of the text is compared with the layout of the ctypes structures.

    Embed: 24 bytes             the size of a struct
    Embed.table: Array at 0     the type and the offset of a field
    STEPS.Embed: 0              a number
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernels.native.call import ELEMENT, GATES, NO_GATE, NO_MEMORY
from kernels.native.structs import SHARED, structure_of
from kernels.steps import ACTIVATIONS, STEPS
from kernels.steps import GATES as GATE_FUNCTIONS

Layout = Mapping[str, str]
"""The lines of a layout: the text before the colon, mapped to the text after the colon."""


def layout_of(
    structures: Sequence[type[ctypes.Structure]] = SHARED, steps: Sequence[type] = STEPS
) -> Layout:
    """Returns Python's layout: of `structures`, of the structures of `steps`, and of the shared
    numbers."""
    lines = dict(_numbers(steps))
    for structure in (*structures, *map(structure_of, steps)):
        lines.update(_described(structure))
    return lines


def check_layout(library: ctypes.CDLL, ours: Layout) -> None:
    """Raises TypeError if a struct, field or number of `library` differs from the layout `ours`.
    The error names the first difference."""
    tell: Any = library.orcinus_layout
    tell.argtypes, tell.restype = (), ctypes.c_char_p
    theirs = dict(line.split(": ") for line in tell().decode().splitlines())
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            raise TypeError(
                f"{name} is {theirs.get(name, 'unknown')} in the native library and "
                f"{ours.get(name, 'unknown')} in Python"
            )


def _numbers(steps: Sequence[type]) -> Iterator[tuple[str, str]]:
    enumerations: Mapping[str, Mapping[str, int]] = {
        "Element": {str(dtype).removeprefix("torch."): n for dtype, n in ELEMENT.items()},
        "Status": {"no_memory": NO_MEMORY},
        "Finish": {"none": NO_GATE, **GATES},
        "Activation": {name: n for n, name in enumerate(ACTIVATIONS)},
        "Gate": {name: n for n, name in enumerate(GATE_FUNCTIONS)},
        "STEPS": {step.__name__: n for n, step in enumerate(steps)},
    }
    for enumeration, numbers in enumerations.items():
        for name, number in numbers.items():
            yield f"{enumeration}.{name}", str(number)


def _described(structure: type[ctypes.Structure]) -> Iterator[tuple[str, str]]:
    """Yields the lines that describe a structure and all structures that its fields contain or
    point to."""
    name = _name(structure)
    yield name, f"{ctypes.sizeof(structure)} bytes"
    for field, kind, *_ in structure._fields_:
        yield f"{name}.{field}", f"{_type_name(kind)} at {getattr(structure, field).offset}"
        inner = kind._type_ if issubclass(kind, ctypes._Pointer) else kind
        if issubclass(inner, ctypes.Structure):
            yield from _described(inner)


def _name(structure: type[ctypes.Structure]) -> str:
    return structure.__name__.removesuffix("Struct")


def _type_name(kind: Any) -> str:
    """Returns the name that the library's layout uses for the type of a field."""
    if issubclass(kind, ctypes.Structure):
        return _name(kind)
    if issubclass(kind, ctypes.Array):
        return f"{kind._length_} x {_type_name(kind._type_)}"
    if issubclass(kind, ctypes.c_void_p | ctypes._Pointer):
        return "pointer"
    is_float = issubclass(kind, ctypes.c_float | ctypes.c_double)
    return f"{'float' if is_float else 'int'}{8 * ctypes.sizeof(kind)}"
