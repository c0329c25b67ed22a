"""Reads the header of a GGUF file, which precedes the tensors: the metadata, and the position of
each tensor.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; versions 2 and
3 are read. A file may come from an untrusted source: every length is checked against the rest of
the file before anything is allocated, and lists of numbers are read as compact arrays.

A model may be split into several files, `NAME-00001-of-00003.gguf` and so on. The first file has
the metadata, and its path is the path of the model. The header of the model describes the tensors
of all files.
"""

from __future__ import annotations

import array
import math
import os
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

SUFFIX = ".gguf"

MAX_BYTES = 48 << 20
"""Largest size of the metadata in bytes, four times as much as a vocabulary of 262,144 tokens
takes."""

MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 12
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
MAX_FILES = 1 << 10
"""Largest number of files of one model."""

_MAX_SMALL_BYTES = 1 << 20  # largest tensor that is read as numbers of Python

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
# The types of numbers, by their number in the file, in the words of `struct` and `array`.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")  # at the end of a name, without the suffix

F32 = 0
"""The number that stands for the element type float32 in the format."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The position, shape and element type of a tensor in a GGUF file."""

    path: Path
    shape: tuple[int, ...]  # the slowest dimension first
    type: int  # the number of its element type
    offset: int  # in its file, bytes

    @property
    def n_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF model: its metadata, and the position of each tensor."""

    path: Path  # the file that names the model, the first of several
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    def floats(self, name: str) -> tuple[float, ...]:
        """Reads and returns the values of a small float32 tensor.

        Raises:
            OSError: the file cannot be read.
            ValueError: the tensor has another type, is not small, or is cut off.
        """
        tensor = self.tensors[name]
        n_bytes = 4 * tensor.n_elements
        if tensor.type != F32 or n_bytes > _MAX_SMALL_BYTES:
            raise ValueError(f"{self.path}: {name} is no small tensor of float32")
        if tensor.offset + n_bytes > tensor.path.stat().st_size:
            raise ValueError(f"{tensor.path} ends inside {name}")
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            content = file.read(n_bytes)
        return struct.unpack(f"<{tensor.n_elements}f", content)


def is_gguf(model: Path) -> bool:
    """Returns whether a path has the ending of a GGUF file's name and is not a directory."""
    return model.suffix == SUFFIX and not model.is_dir()


def model_name(model: Path) -> str:
    """Returns the name of a model: the name of its directory or file.

    If the path is a symbolic link, the result is the link's own name, because the target may be a
    folder of a cache. For a model in several files, the number of the file is not part of the name.
    """
    name = Path(os.path.abspath(model)).name
    return _SPLIT.sub("", name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else name


def model_files(model: Path) -> list[Path]:
    """Returns the paths of all files of the model to which the GGUF file `model` belongs. They
    follow from the file's name, and nothing is read. Raises ValueError if the name says that there
    are more than `MAX_FILES` files."""
    stem = model.name.removesuffix(SUFFIX)
    split = _SPLIT.search(stem)
    if split is None:
        return [model]
    count = int(split[2])
    if count > MAX_FILES:
        raise ValueError(f"{model} is one of {count} files, more than {MAX_FILES}")
    return [
        model.with_name(f"{stem[: split.start()]}-{number:05}-of-{split[2]}{SUFFIX}")
        for number in range(1, count + 1)
    ]


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a model. `path` is the model's only file, or the first of its files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not a GGUF file, is broken, or does not belong to the other files; the
            message names the file.
    """
    header = _read_one(path)
    count = header.metadata.get("split.count") or 1
    if count == 1:
        return header
    paths = model_files(path)
    if len(paths) != count:
        raise ValueError(
            f"{path}: split.count is {repr(count)[:20]}, and the file's name does not end in "
            f"-00001-of- and this number"
        )
    if path != paths[0]:
        raise ValueError(f"{path} is one of {count} files: name the first, {paths[0]}")
    tensors = dict(header.tensors)
    for number, other in enumerate(paths[1:], 1):
        part = _read_one(other)
        said = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if said != (number, count):
            raise ValueError(f"{other}: split.no and split.count are {said}, not {number, count}")
        if again := sorted(tensors.keys() & part.tensors.keys()):
            raise ValueError(f"{other} has tensors that another file has too: {again[:4]}")
        tensors |= part.tensors
    n_tensors = header.metadata.get("split.tensors.count", len(tensors))
    if n_tensors != len(tensors):
        raise ValueError(f"{path}: the {count} files have {len(tensors)} of {n_tensors} tensors")
    return replace(header, tensors=tensors)


def _read_one(path: Path) -> GgufHeader:
    """Reads the header of one file. The result has only the tensors of this file."""
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
            if key in metadata:
                raise ValueError(f"{path} has the key {key[:80]} twice")
            metadata[key] = reader.value(reader.number("I"))
        places = dict(reader.tensor() for _ in range(n_tensors))
        if len(places) < n_tensors:
            raise ValueError(f"{path} has two tensors of one name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            raise ValueError(f"{path}: general.alignment is {alignment!r}")
        begin = -(-file.tell() // alignment) * alignment
    tensors = {
        name: TensorPlace(path, place.shape, place.type, begin + place.offset)
        for name, place in places.items()
    }
    return GgufHeader(path, metadata, tensors)


def token_id_of(metadata: Mapping[str, Any], name: str) -> int | None:
    """Returns the token id that the metadata has under `name`, such as `eos_token_id`. Returns None
    if the metadata has no such key.

    Raises:
        ValueError: the value is not a whole number.
    """
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and type(value) is not int:
        raise ValueError(f"tokenizer.ggml.{name} {repr(value)[:80]} is no number of a token")
    return value


class _Reader:
    """Reads values from a file one after the other, and refuses to read more than a maximum number
    of bytes."""

    def __init__(self, file: IO[bytes], n_bytes: int, path: Path) -> None:
        self._file = file
        self._n_left = n_bytes
        self._path = path

    def take(self, n_bytes: int) -> bytes:
        """Reads and returns the next `n_bytes` bytes."""
        content = self._file.read(n_bytes) if n_bytes <= self._n_left else b""
        if len(content) < n_bytes:
            raise ValueError(
                f"{self._path} ends inside its metadata, or that has more than {MAX_BYTES} bytes"
            )
        self._n_left -= n_bytes
        return content

    def number(self, kind: str) -> Any:
        """Reads and returns a number. `kind` is its type, as a format character of the module
        `struct`."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, largest: int, what: str) -> int:
        """Reads and returns a number of items that follow. `what` is the plural noun for the items
        in error messages. Raises ValueError if the number is greater than `largest`."""
        count: int = self.number("Q")
        if count > largest:
            raise ValueError(f"{self._path} says that it has {count} {what}")
        return count

    def string(self) -> str:
        """Reads and returns a text. Bytes that are not UTF-8 become replacement characters."""
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """Reads and returns a value: a number, a boolean, a text, or a list of values of one type.
        `kind` is the number by which the format denotes the type."""
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
        """Reads the description of a tensor, and returns the tensor's name and place. The offset in
        the place is counted from the beginning of the data of all tensors."""
        name = self.string()
        n_dimensions = self.number("I")
        if n_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{self._path}: {name[:80]} has {n_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(n_dimensions))[::-1]
        return name, TensorPlace(self._path, shape, self.number("I"), self.number("Q"))
