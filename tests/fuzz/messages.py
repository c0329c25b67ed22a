"""Protobuf messages of any type, made up from its descriptor, and bytes that are nearly such.

Fields are left out, set to the ends of their ranges, or to anything. `Hints` has values of fields,
by their full names, that random ones would never meet: the name of the model, tokens of its
vocabulary. Messages have unknown fields here and there. The bytes of some messages are then cut,
changed or doubled, so that a parser also reads bytes that are no message.
"""

import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.choices import Choices

Hint = Callable[[Choices], Any]
Hints = Mapping[str, Hint]

MAX_DEPTH = 4
MAX_FIELDS = 6
MAX_ITEMS = 4
MAX_MUTATIONS = 3

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of fields."""

_SCALARS: dict[int, Hint] = {
    FieldDescriptor.CPPTYPE_INT32: lambda choices: choices.whole_number(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: lambda choices: choices.whole_number(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: lambda choices: choices.whole_number(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: lambda choices: choices.whole_number(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: Choices.number,
    FieldDescriptor.CPPTYPE_FLOAT: Choices.number,
    FieldDescriptor.CPPTYPE_BOOL: lambda choices: bool(choices.below(2)),
    FieldDescriptor.CPPTYPE_ENUM: lambda choices: choices.whole_number(-(2**31), 2**31 - 1),
}

Mutation = Callable[[bytes, int, int], bytes]

_MUTATIONS: list[Mutation] = [
    lambda data, at, _: data[:at],
    lambda data, at, value: data[:at] + bytes([value]) + data[at + 1 :],
    lambda data, at, value: data[:at] + bytes([value]) + data[at:],
    lambda data, at, value: data[:at] + data[at + 1 + value % 8 :],
    lambda data, at, value: data[: at + value] + data[at:],
    lambda data, at, value: data[:at] + b"\xff" * (value % 12) + data[at:],
]


def message(
    choices: Choices, descriptor: Descriptor, hints: Hints, *, depth: int = MAX_DEPTH
) -> Message:
    """Returns a message of a type with some of its fields, at most `depth` messages inside each
    other. Fields with a hint are rarely left out."""
    made = GetMessageClass(descriptor)()
    fields = [f for f in descriptor.fields if depth > 1 or f.message_type is None]
    chosen = [f for f in fields if f.full_name in hints and not choices.one_in(8)]
    if fields:
        chosen += choices.several(MAX_FIELDS, lambda: choices.one_of(fields))
    for field in chosen:
        _set(made, field, choices, partial(_value, choices, field, hints, depth))
    if choices.one_in(16):
        with suppress(DecodeError):  # a known number, and text that is none
            # Apart: protobuf leaves a message that could not be merged broken, and copying it ends
            # the process.
            made.MergeFrom(type(made).FromString(unknown_field(choices)))
    return made


def _set(
    made: Message, field: FieldDescriptor, choices: Choices, make_value: Callable[[], Any]
) -> None:
    if field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry:
        for entry in choices.several(MAX_ITEMS, make_value):
            getattr(made, field.name)[entry.key] = (
                entry.value
            )  # of what all maps here have: numbers
    elif field.is_repeated:
        getattr(made, field.name).extend(choices.several(MAX_ITEMS, make_value))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(made, field.name).CopyFrom(make_value())
    else:
        setattr(made, field.name, make_value())


def _value(choices: Choices, field: FieldDescriptor, hints: Hints, depth: int) -> Any:
    if field.message_type is not None:
        return message(choices, field.message_type, hints, depth=depth - 1)
    if field.full_name in hints and not choices.one_in(6):
        return hints[field.full_name](choices)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return choices.take(choices.below(50))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return choices.text()
    return _SCALARS[field.cpp_type](choices)


def unknown_field(choices: Choices) -> bytes:
    """Returns the bytes of a field that no message has, or not with that wire type."""
    number = choices.one_of([1, 2, 3, 15, 16, 999, 19_000, 2**29 - 1])
    wire_type = choices.one_of([_VARINT, _FIXED64, _BYTES, _FIXED32])
    tag = _varint(number << 3 | wire_type)
    if wire_type == _VARINT:
        return tag + _varint(choices.whole_number(0, 2**64 - 1))
    if wire_type == _BYTES:
        data = choices.take(choices.below(20))
        return tag + _varint(len(data)) + data
    return tag + struct.pack("<d" if wire_type == _FIXED64 else "<f", choices.number())


def wire(choices: Choices, descriptor: Descriptor, hints: Hints) -> bytes:
    """Returns the bytes of a random message of a type. One time in four, the bytes are changed, so
    that they may be no message."""
    data = message(choices, descriptor, hints).SerializeToString()
    if not choices.one_in(4):
        return data
    data += choices.take(choices.below(10)) if choices.below(2) else unknown_field(choices)
    for mutate in choices.several(MAX_MUTATIONS, lambda: choices.one_of(_MUTATIONS)):
        data = mutate(data, choices.below(len(data) + 1), choices.below(256))
    return data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
