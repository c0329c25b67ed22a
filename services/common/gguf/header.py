"""Reads the header of a GGUF file, which is in front of the tensors: the metadata, and the place of
each tensor.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; versions 2 and
3 are read. A file may come from a stranger: every length is checked against the rest of the file
before anything is allocated, and the numbers of long lists stay in arrays.
"""

from __future__ import annotations

import array
import math
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

SUFFIX = ".gguf"

MAX_BYTES = 48 << 20
"""Maximum bytes of metadata, four times as much as a vocabulary of 262,144 tokens takes."""

MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 12
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16

_MAX_SMALL_BYTES = 1 << 20  # largest tensor that is read as numbers of Python

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
# The types of numbers, by their number in the file, in the words of `struct` and `array`.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

F32 = 0
"""Number of the element type float32 in the format."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in the file."""

    shape: tuple[int, ...]  # the slowest dimension first
    type: int  # the number of its element type
    offset: int  # in the file, bytes

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file: its metadata, and the place of each tensor."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    def floats(self, name: str) -> tuple[float, ...]:
        """Returns a small tensor of float32.

        Raises:
            OSError: the file cannot be read.
            ValueError: the tensor has another type, is not small, or is cut off.
        """
        tensor = self.tensors[name]
        n_bytes = 4 * tensor.n_elements
        if tensor.type != F32 or n_bytes > _MAX_SMALL_BYTES:
            raise ValueError(f"{self.path}: {name} is no small tensor of float32")
        if tensor.offset + n_bytes > self.path.stat().st_size:
            raise ValueError(f"{self.path} ends inside {name}")
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            content = file.read(n_bytes)
        return struct.unpack(f"<{tensor.n_elements}f", content)


def is_gguf(model: Path) -> bool:
    """Returns whether a path has the name of a GGUF file and is not a directory."""
    return model.suffix == SUFFIX and not model.is_dir()


def model_name(model: Path) -> str:
    """Returns the name of a model: the name of its directory or file.

    For a link, the name of the link is returned, since the target may be a folder of a cache.
    """
    return Path(os.path.abspath(model)).name.removesuffix(SUFFIX)


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no GGUF file, or is broken; the message says where.
    """
    with path.open("rb") as file:
        reader = _Reader(file, min(path.stat().st_size, MAX_BYTES), path)
        if reader.take(4) != _MAGIC:
            raise ValueError(f"{path} is no GGUF file")
        version = reader.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"{path}: version {version} of GGUF is not one of {list(_VERSIONS)}")
        n_tensors = reader.count(MAX_TENSORS, "tensors")
        n_keys = reader.count(MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = reader.string()
            metadata[key] = reader.value(reader.number("I"))
        places = dict(reader.tensor() for _ in range(n_tensors))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            raise ValueError(f"{path}: general.alignment is {alignment!r}")
        begin = -(-file.tell() // alignment) * alignment
    tensors = {
        name: TensorPlace(place.shape, place.type, begin + place.offset)
        for name, place in places.items()
    }
    return GgufHeader(path, metadata, tensors)


class _Reader:
    """Reads one value after the other, and refuses to read beyond a maximum number of bytes."""

    def __init__(self, file: IO[bytes], n_bytes: int, path: Path) -> None:
        self._file = file
        self._n_left = n_bytes
        self._path = path

    def take(self, n_bytes: int) -> bytes:
        """Returns the next bytes."""
        content = self._file.read(n_bytes) if n_bytes <= self._n_left else b""
        if len(content) < n_bytes:
            raise ValueError(
                f"{self._path} ends inside its metadata, or that has more than {MAX_BYTES} bytes"
            )
        self._n_left -= n_bytes
        return content

    def number(self, kind: str) -> Any:
        """Returns a number of a type of `struct`."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, largest: int, what: str) -> int:
        """Returns a number of items; raises ValueError if it is greater than `largest`."""
        count: int = self.number("Q")
        if count > largest:
            raise ValueError(f"{self._path} says that it has {count} {what}")
        return count

    def string(self) -> str:
        """Returns a text, with replacement characters for bytes that are not UTF-8."""
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """Returns a value of a type: a number, a boolean, a text, or a list of values of one
        type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._list(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"{self._path}: a value has the unknown type {kind}")
        number = self.number(_NUMBERS[kind])
        return bool(number) if kind == _BOOL else number

    def _list(self, kind: int, length: int) -> Any:
        if kind == _STRING:
            if 8 * length > self._n_left:
                self.take(8 * length)  # raises, since there are not so many bytes
            return [self.string() for _ in range(length)]
        if kind not in _NUMBERS:
            raise ValueError(f"{self._path}: a list has elements of the type {kind}")
        numbers = array.array(_NUMBERS[kind])
        numbers.frombytes(self.take(length * numbers.itemsize))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def tensor(self) -> tuple[str, TensorPlace]:
        """Returns a tensor and its name. The offset of the tensor counts from the end of the
        metadata."""
        name = self.string()
        n_dimensions = self.number("I")
        if n_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{self._path}: {name[:80]} has {n_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(n_dimensions))[::-1]
        return name, TensorPlace(shape, self.number("I"), self.number("Q"))
