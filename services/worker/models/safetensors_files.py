"""The tensors in the safetensors files of a directory.

Files are mapped, and pages that were read would stay resident until the file is unmapped, so that
is done again and again on the way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common import bounded_file
from services.common.gguf.header import is_gguf
from services.worker.models.tensor_files import (
    CheckpointError,
    Header,
    TensorFiles,
    enumerate_problems,
)

ELEMENT_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1,
}  # fmt: skip
"""Bytes of an element of each type that is read."""

_MAX_MAPPED_BYTES = 1 << 25  # of what was read, before files are unmapped
_N_SAMPLES = 32  # of each weight file, spread evenly, for its digest
_SAMPLE_BYTES = 4096
_MAX_INDEX_BYTES = 1 << 26  # that of a model with a trillion parameters has a third


class SafetensorsFiles(TensorFiles):
    """A checkpoint's files, mapped on demand and unmapped when enough of them is resident."""

    def __init__(self, directory: Path) -> None:
        """Reads nothing yet; what is first asked for raises CheckpointError for a directory without
        tensors, or with a broken index."""
        self._directory = directory
        self._files: dict[Path, Any] = {}
        self._n_bytes = 0

    def __str__(self) -> str:
        return str(self._directory)

    @cached_property
    def _paths(self) -> dict[str, Path]:
        return _tensor_paths(self._directory)

    def find(self, name: str) -> str | None:
        return next((each for each in _spellings(name) if each in self._paths), None)

    def header(self, name: str) -> Header:
        found = self._slice(name)
        shape, element = tuple(found.get_shape()), str(found.get_dtype())
        return Header(shape, element, math.prod(shape[1:]) * ELEMENT_SIZES.get(element, 0))

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        # A row counts whole, since its pages are read whole.
        n_bytes = self.header(name).row_bytes * (len(spans[0]) if spans else 1)
        if self._n_bytes + n_bytes > _MAX_MAPPED_BYTES:
            self.close()
        self._n_bytes += n_bytes
        index = tuple(slice(span.start, span.stop) for span in spans)
        if not index:
            found: Tensor = self._file(name).get_tensor(name)
            return found
        part: Tensor = self._slice(name)[index]
        return part

    def close(self) -> None:
        """Closes all files; views of their tensors keep them mapped."""
        self._files.clear()
        self._n_bytes = 0

    def _file(self, name: str) -> Any:
        path = self._paths[name]
        if path not in self._files:
            self._files[path] = _open_file(path)
        return self._files[path]

    def _slice(self, name: str) -> Any:
        try:
            return self._file(name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._paths[name]}: {error}") from error


def checkpoint_digest(model: Path) -> str:
    """Tells checkpoints of the same shape apart, by the sizes and samples of their weight files.

    It reads little, so it is no checksum. Raises CheckpointError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    paths = [model] if is_gguf(model) else sorted(set(_tensor_paths(model).values()))
    for path in paths:
        try:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for sample in range(_N_SAMPLES):
                    file.seek(sample * size // _N_SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _tensor_paths(directory: Path) -> dict[str, Path]:
    """Returns the file of each tensor: as the index says, or all in `model.safetensors`."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            contents = bounded_file.read_json_object(index, max_bytes=_MAX_INDEX_BYTES)
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from error
        weight_map = contents.get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map")
        wrong = [repr(file)[:80] for file in weight_map.values() if not _is_file_name(file)]
        if wrong:
            raise CheckpointError(f"{index} names {enumerate_problems(wrong)}: no files beside it")
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{directory} has no model.safetensors and no index of several")
    with _open_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def _is_file_name(file: object) -> bool:
    """Whether an index may name this file: it lies in the same folder.

    The name counts and not where a link of that name leads, since the hub's cache is all links.
    """
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and not {"/", "\\", "\0"} & set(file)
    )


def _spellings(name: str) -> Iterator[str]:
    """Yields the names that a tensor may have in a checkpoint, that of its family first.

    Some checkpoints were saved from the model without its head (GPT-2's own, for one): their names
    lack the first word, "transformer." or "model.". Those of `text_half` have another word before
    or after it.
    """
    yield name
    first, _, rest = name.partition(".")
    yield rest
    yield f"language_model.{name}"
    yield f"{first}.language_model.{rest}"


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
