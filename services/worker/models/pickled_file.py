"""Reads a weight file of `torch.save`, such as `pytorch_model.bin`.

Such a file is a pickle of tensors and may come from an untrusted source. So it is read by PyTorch's
restricted unpickler, which creates only tensors and containers. The tensors are mapped into memory,
and their values are read when they are used.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.worker.models.tensor_files import CheckpointError

MAX_PICKLE_BYTES = 64 << 20
"""Largest size in bytes of the pickle in a file. The pickle describes the tensors and does not
contain their values."""

_ELEMENTS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""The names of element types in safetensors, by PyTorch's types."""

_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)
"""Errors with which PyTorch refuses a file. They have no common base class that could be caught
instead."""


class PickledSlice:
    """A tensor in a weight file. It has the methods of a slice in the library safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Returns the shape of the tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Returns the name of the element type. A tensor whose values are not stored as a plain
        array gets the name of its storage form, such as a sparse layout."""
        tensor = self._tensor
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return f"{tensor.layout} on {tensor.device.type}"
        return _ELEMENTS.get(tensor.dtype, str(tensor.dtype))

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._tensor[index]


class PickledFile:
    """An open file of `torch.save`. It has the methods of an open file in the library
    safetensors."""

    def __init__(self, path: Path) -> None:
        """Reads the descriptions of all tensors.

        Raises:
            CheckpointError: the file cannot be read, or is not a mapping of names to tensors.
        """
        self._path = path
        try:
            found = torch.load(
                path, map_location="cpu", weights_only=True, mmap=_can_be_mapped(path)
            )
        except _ERRORS as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(f"{path} cannot be read: {reason[0]}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds no tensors by name")
        self._tensors: dict[str, Tensor] = {
            name: value.detach()
            for name, value in found.items()
            if isinstance(name, str) and isinstance(value, Tensor)
        }
        if not self._tensors:
            raise CheckpointError(f"{path} holds no tensors by name, but {_names(found)}")

    def keys(self) -> Iterable[str]:
        """Returns the names of the tensors."""
        return self._tensors.keys()

    def get_slice(self, name: str) -> PickledSlice:
        """Returns the tensor `name` as an object that reads parts of it.

        Raises:
            CheckpointError: the file has no such tensor.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self._path}: has no tensor {name}")
        return PickledSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """Returns a whole tensor."""
        return self._tensors[name]


def _can_be_mapped(path: Path) -> bool:
    """Returns whether a file can be mapped into memory. It can if it is a zip archive, which
    PyTorch has written since version 1.6. An older file must be read as a whole.

    Raises:
        ValueError: the file is an archive with compressed parts, or with a pickle that is too long.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    for part in parts:
        if part.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{part.filename[:80]!r} is compressed")
        if part.filename.endswith("/data.pkl") and part.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
    return True


def _names(found: dict[Any, Any]) -> str:
    return ", ".join(repr(name)[:80] for name in list(found)[:4]) or "nothing"
