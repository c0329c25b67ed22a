"""The tensors in the weight files of a directory: safetensors, or files of `torch.save`.

Files are mapped into memory. Pages that were read stay resident until the file is unmapped, so
files are unmapped repeatedly while a checkpoint is read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.gguf.header import is_gguf, model_files
from services.worker.models.pickled_file import PickledFile
from services.worker.models.tensor_files import (
    CheckpointError,
    Header,
    TensorFiles,
)
from services.worker.models.weight_files import PICKLED, find_weight_files

ELEMENT_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U32": 4, "I8": 1, "U8": 1,
    "F8_E4M3": 1,
}  # fmt: skip
"""Size in bytes of an element, for each element type that can be read."""

_MAX_MAPPED_BYTES = 1 << 25  # bytes to read before files are unmapped
_N_SAMPLES = 32  # samples of each weight file, spread evenly, for the digest
_SAMPLE_BYTES = 4096


class DirectoryFiles(TensorFiles):
    """The weight files of a checkpoint. They are mapped on demand, and unmapped again when many
    bytes have been read."""

    def __init__(self, directory: Path) -> None:
        """Opens no file yet. If the directory has no tensors or a broken index, the first access to
        a tensor raises CheckpointError."""
        self._directory = directory
        self._files: dict[Path, Any] = {}
        self._n_bytes = 0

    def __str__(self) -> str:
        return str(_main_file(self._directory))

    @cached_property
    def _paths(self) -> dict[str, Path]:
        return _tensor_paths(self._directory)

    def names(self) -> Collection[str]:
        return self._paths.keys()

    def paths(self) -> Collection[Path]:
        return set(self._paths.values())

    @property
    def is_gguf(self) -> bool:
        return False

    def unread_biases(self) -> list[str]:
        return []

    def find(self, name: str) -> str | None:
        return next((each for each in _spellings(name) if each in self._paths), None)

    def header(self, name: str) -> Header:
        found = self._slice(name)
        shape, element = tuple(found.get_shape()), str(found.get_dtype())
        return Header(shape, element, math.prod(shape[1:]) * ELEMENT_SIZES.get(element, 0))

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        # A whole row is counted, since whole pages are read.
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
        """Closes all files. Views of tensors that are still in use keep their file mapped."""
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
    """Returns a digest that distinguishes checkpoints whose tensors have equal shapes.

    The digest is computed from the sizes and samples of the weight files. It is not a checksum,
    because most bytes are not read. Raises CheckpointError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    paths = model_files(model) if is_gguf(model) else find_weight_files(model).paths
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


def weights_digest(model: Path) -> str:
    """Returns a digest of all bytes of the weight files. It is the SHA-256 of the output of the
    program `sha256sum` for these files, in the order of their names: a line for each file, with the
    digest of the file, two spaces and the file's name. Takes about a second for 1.5 GB.

    Raises:
        CheckpointError: a file cannot be read.
    """
    paths = model_files(model) if is_gguf(model) else find_weight_files(model).paths
    lines = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        lines.update(f"{digest}  {path.name}\n".encode())
    return lines.hexdigest()


def files_digest(model: Path) -> str:
    """Returns a digest that changes whenever a weight file changes. `checkpoint_digest` may stay
    the same, because it is computed from samples.

    The digest includes the inode of each file and the time of its last change of any kind (ctime).
    Even a copy that keeps the time of modification has another ctime.
    """
    paths = model_files(model) if is_gguf(model) else find_weight_files(model).paths
    stats = [path.stat() for path in paths]
    identities = [(stat.st_ino, stat.st_ctime_ns) for stat in stats]
    return hashlib.sha256(f"{checkpoint_digest(model)} {identities}".encode()).hexdigest()


def _main_file(directory: Path) -> Path:
    """Returns the file that stands for the checkpoint in messages: the only weight file, or else
    the index. If there is neither, it is `model.safetensors`."""
    try:
        paths = find_weight_files(directory).paths
    except CheckpointError:
        return directory / "model.safetensors"
    if len(paths) == 1:
        return paths[0]
    indices = sorted(directory.glob("*.index.json"))
    return indices[0] if indices else directory / "model.safetensors"


def _tensor_paths(directory: Path) -> dict[str, Path]:
    """Returns the path of the file that contains each tensor, by the tensor's name."""
    files = find_weight_files(directory)
    if files.by_tensor is not None:
        return dict(files.by_tensor)
    found: dict[str, Path] = {}
    for path in files.paths:
        found |= dict.fromkeys(_open_file(path).keys(), path)
    return found


def _spellings(name: str) -> Iterator[str]:
    """Yields the names under which a checkpoint may store a tensor. The first one is `name`, the
    family's own name.

    Some checkpoints (such as GPT-2's own) were saved from the model without the head: their names
    lack the first word, "transformer." or "model.". Checkpoints that `text_half.py` reads have the
    word "language_model" before or after the first word.
    """
    yield name
    first, _, rest = name.partition(".")
    yield rest
    yield f"language_model.{name}"
    yield f"{first}.language_model.{rest}"


def _open_file(path: Path) -> Any:
    if not path.exists():
        raise CheckpointError(f"{path} cannot be read: it is missing; fetch it again")
    if path.suffix == PICKLED:
        return PickledFile(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
