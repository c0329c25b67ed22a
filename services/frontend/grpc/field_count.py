"""The number of fields in a protobuf message, counted before it is parsed.

A byte of a message can become a hundred of memory: two bytes are a message in a repeated field, and
three an unknown field. Nothing that a client sends has many, since numbers of a repeated field are
packed into one. Only bytes that a parser would take are walked through correctly; others are
counted as far as they go, and refused by the parser.
"""

from functools import cache
from typing import Any

from google.protobuf.message import Message

VARINT, I64, LEN, I32 = 0, 1, 2, 5
"""Kinds of fields on the wire; the beginning and the end of a group have no content of their
own."""


def has_more_fields(data: bytes, message_class: type[Message], limit: int) -> bool:
    """Returns whether a message of that type, with the messages in it, has more fields than the
    limit; takes no longer than `limit` fields do."""
    n_fields = 0
    pending: list[tuple[int, int, Any]] = [(0, len(data), message_class.DESCRIPTOR)]
    while pending:
        position, end, kind = pending.pop()
        messages = _messages_in(kind)
        while position < end:
            n_fields += 1
            if n_fields > limit:
                return True
            tag, position = _varint(data, position, end)
            wire_type = tag & 7
            if wire_type == LEN:
                length, position = _varint(data, position, end)
                inner = messages.get(tag >> 3)
                if inner is not None:
                    pending.append((position, min(position + length, end), inner))
                position += length
            elif wire_type == VARINT:
                _, position = _varint(data, position, end)
            elif wire_type == I64:
                position += 8
            elif wire_type == I32:
                position += 4
    return False


@cache
def _messages_in(kind: Any) -> dict[int, Any]:
    """Returns the descriptors of a descriptor's fields that are messages, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type}


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Returns a number and the position after it; one that is cut off ends where the data does."""
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, position
