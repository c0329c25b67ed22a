"""A file of packed matrices, which is mapped into memory and not copied.

    8 bytes   a mark of the file format
    8 bytes   length of the header, then 4 bytes with the CRC-32 of the header
    header    JSON: for each matrix its description, shape, place and CRC-32
    matrices  each begins at a multiple of 64 bytes, the length of a cache line

Checksums find files that a full disk or a crash has damaged. They do not protect against a person
with the right to write the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from kernels.packing.stored import StoredMatrix

_PREFIX = struct.Struct("<8sQI")
_MARK = b"ORCPACK1"
_ALIGNMENT = 64
_MAX_HEADER = 1 << 28


class DamagedFileError(Exception):
    """A file of packed matrices is incomplete or damaged."""


def write_packed(file: IO[bytes], matrices: Mapping[str, StoredMatrix]) -> None:
    """Writes `matrices` into `file`, which must be empty."""
    entries, place = {}, 0
    for name, matrix in matrices.items():
        entries[name] = {
            "description": dict(matrix.description),
            "shape": list(matrix.packed.shape),
            "place": place,
            "crc32": zlib.crc32(_bytes(matrix.packed)),
        }
        place = _aligned(place + matrix.packed.nbytes)
    header = json.dumps(entries).encode()
    file.write(_PREFIX.pack(_MARK, len(header), zlib.crc32(header)) + header)
    for matrix in matrices.values():
        file.write(bytes(_aligned(file.tell()) - file.tell()))
        file.write(_bytes(matrix.packed))


def read_packed(path: Path) -> dict[str, StoredMatrix]:
    """Maps the file at `path`, checks the checksums, and returns the matrices by name.

    Raises DamagedFileError for a damaged file, and OSError if it cannot be read.
    """
    with path.open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        entries, first = _header(file)
    try:
        whole = torch.from_file(str(path), shared=False, size=n_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # too little address space, or the file is gone
        raise OSError(f"it cannot be mapped: {error}") from error
    return dict(_matrices(whole[first:], entries))


def size_of(matrices: Mapping[str, StoredMatrix]) -> int:
    """Returns the number of bytes that matrices take in a file. The header of the file, which is
    small, is not counted."""
    return sum(_aligned(matrix.packed.nbytes) for matrix in matrices.values())


def _header(file: IO[bytes]) -> tuple[dict[str, dict[str, Any]], int]:
    """Returns the entries of the header, and the offset in bytes of the first matrix in the
    file."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise DamagedFileError("the file is too short")
    mark, length, checksum = _PREFIX.unpack(prefix)
    if mark != _MARK or length > _MAX_HEADER:
        raise DamagedFileError("the file does not begin as a file of packed matrices")
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise DamagedFileError("the header's checksum is wrong")
    return json.loads(header), _aligned(_PREFIX.size + length)


def _matrices(
    content: Tensor, entries: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[str, StoredMatrix]]:
    for name, entry in entries.items():
        place, n_bytes = entry["place"], math.prod(entry["shape"])
        packed = content[place : place + n_bytes]
        if len(packed) != n_bytes or zlib.crc32(_bytes(packed)) != entry["crc32"]:
            raise DamagedFileError(f"{name} is cut off or its checksum is wrong")
        yield name, StoredMatrix(packed.view(entry["shape"]), entry["description"])


def _bytes(packed: Tensor) -> Any:
    """Returns the bytes of `packed` as an array, which supports Python's buffer protocol."""
    return packed.contiguous().view(-1).numpy()


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
