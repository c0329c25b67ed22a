"""The number of fields in a protobuf message, counted before the message is parsed.

Parsing can turn one byte of a message into a hundred bytes of memory: an empty message in a
repeated field takes two bytes on the wire, and an unknown field takes three. Real requests have few
fields, because all numbers of a repeated field are packed into one field. The count of a valid
message is exact. In an invalid message, only the fields that can be read are counted, and the
parser refuses the message afterwards.
"""

from functools import cache
from typing import Any

from google.protobuf.message import Message

VARINT, I64, LEN, I32 = 0, 1, 2, 5
"""Wire types of fields. The two other wire types, which begin and end a group, have no content."""


def has_more_fields(data: bytes, message_class: type[Message], limit: int) -> bool:
    """Returns whether a serialised message of class `message_class`, with the messages nested in
    it, has more than `limit` fields. Stops counting when the limit is exceeded."""
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
    """Returns the message types of a message's fields, keyed by field number. `kind` is the
    descriptor of the message. Fields that do not hold messages are left out."""
    return {field.number: field.message_type for field in kind.fields if field.message_type}


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Returns the varint at `position` and the position after it. A varint that is cut off is read
    up to `end`."""
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, position
