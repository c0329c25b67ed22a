"""A GGUF file taken apart and put together again, so that each part of it can lie."""

import struct
from dataclasses import dataclass, field

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
ALIGNMENT = 32


@dataclass
class Value:
    """A value of the metadata: the number of its type, and its bytes."""

    key: str
    kind: int
    content: bytes


@dataclass
class Place:
    """The description of a tensor in the header of a file."""

    name: str
    shape: list[int]  # the fastest dimension first, as in the file
    kind: int
    offset: int


@dataclass
class GgufLayout:
    """A whole file."""

    version: int = 3
    values: list[Value] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    data: bytes = b""
    n_values: int | None = None  # what the file says instead of the truth
    n_places: int | None = None

    @classmethod
    def of(cls, content: bytes) -> "GgufLayout":
        """Returns the parts of a file, which must be whole."""
        version, n_places, n_values = struct.unpack_from("<IQQ", content, 4)
        at, made = 24, cls(version)
        for _ in range(n_values):
            key, at = _string(content, at)
            (kind,) = struct.unpack_from("<I", content, at)
            end = _end(content, at + 4, kind)
            made.values.append(Value(key, kind, content[at + 4 : end]))
            at = end
        for _ in range(n_places):
            name, at = _string(content, at)
            (n_dims,) = struct.unpack_from("<I", content, at)
            *shape, kind, offset = struct.unpack_from(f"<{n_dims}QIQ", content, at + 4)
            made.places.append(Place(name, shape, kind, offset))
            at += 4 + 8 * n_dims + 12
        made.data = content[-(-at // ALIGNMENT) * ALIGNMENT :]
        return made

    def to_bytes(self) -> bytes:
        """Returns the file."""
        n_values = len(self.values) if self.n_values is None else self.n_values
        n_places = len(self.places) if self.n_places is None else self.n_places
        head = b"GGUF" + struct.pack("<IQQ", self.version, n_places, n_values)
        for value in self.values:
            head += text(value.key) + struct.pack("<I", value.kind) + value.content
        for place in self.places:
            sizes = [size % 2**64 for size in place.shape]
            head += text(place.name) + struct.pack("<I", len(sizes))
            head += struct.pack(f"<{len(sizes)}QIQ", *sizes, place.kind, place.offset % 2**64)
        return head + bytes(-len(head) % ALIGNMENT) + self.data


def text(content: str) -> bytes:
    """Returns a text as the format has it."""
    encoded = content.encode(errors="surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def _string(content: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", content, at)
    end = at + 8 + length
    return content[at + 8 : end].decode(), end


def _end(content: bytes, at: int, kind: int) -> int:
    """Returns where a value ends that begins at `at`."""
    if kind == _STRING:
        return _string(content, at)[1]
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, length = struct.unpack_from("<IQ", content, at)
    at += 12
    for _ in range(length if inner == _STRING else 0):
        at = _end(content, at, inner)
    return at if inner == _STRING else at + length * _SIZES[inner]
