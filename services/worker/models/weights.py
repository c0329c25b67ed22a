"""Reads a stage's tensors from a safetensors checkpoint, and only these.

A model is built twice from the same code: first from `WantedTensors`, which records what it asks
for and answers with tensors that have no storage, then from `CheckpointTensors`, which knows by
then how much there is to read and that every tensor is there in the right shape. So a wrong
checkpoint is refused before a single weight has been read, with all that is wrong with it.

Knows names and shapes, not what a tensor is for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

OnProgress = Callable[[int, int], None]  # bytes done, bytes total

_ELEMENT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_N_SAMPLES = 32  # of each weight file, spread evenly, for its digest
_SAMPLE_BYTES = 4096
_MAX_PROBLEMS = 8  # named in one error; a wrong checkpoint usually has hundreds of the same kind


class CheckpointError(ValueError):
    """The checkpoint's files are not what its configuration promises; the message names them."""


class TensorSource(Protocol):
    """Where a model takes its tensors from."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must have that shape."""


class WantedTensors:
    """Remembers which tensors a model asks for."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")


class CheckpointTensors:
    """The wanted tensors of a checkpoint, each read once, in the element type and place wanted."""

    def __init__(
        self,
        directory: Path,
        wanted: WantedTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
    ) -> None:
        """Opens the files and checks names and shapes; raises CheckpointError."""
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._n_bytes_done = 0
        self._open_files = ExitStack()
        try:
            self._files = self._open(directory, wanted)
            self._n_bytes = self._check(wanted)
        except BaseException:
            self._open_files.close()
            raise
        self._n_bytes_total = sum(self._n_bytes.values())
        on_progress(0, self._n_bytes_total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open_files.close()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name` [*shape]."""
        # Copied, since what safetensors returns may be a view of the mapped file.
        tensor: Tensor = self._files[name].get_tensor(name)
        tensor = tensor.to(device=self._device, dtype=self._dtype, copy=True)
        self._n_bytes_done += self._n_bytes[name]
        self._on_progress(self._n_bytes_done, self._n_bytes_total)
        return tensor

    def _open(self, directory: Path, wanted: WantedTensors) -> dict[str, Any]:
        """An open file for each wanted tensor; opens no file that has none of them."""
        paths = _tensor_paths(directory)
        missing = [name for name in wanted.shapes if name not in paths]
        if missing:
            raise CheckpointError(f"{directory} lacks {_enumerate(missing)}")
        opened = {
            path: self._open_files.enter_context(_open_file(path))
            for path in sorted({paths[name] for name in wanted.shapes})
        }
        return {name: opened[paths[name]] for name in wanted.shapes}

    def _check(self, wanted: WantedTensors) -> dict[str, int]:
        """Bytes of each wanted tensor in the files."""
        n_bytes = {}
        problems = []
        for name, shape in wanted.shapes.items():
            header = self._files[name].get_slice(name)
            found, element = tuple(header.get_shape()), header.get_dtype()
            if found != shape:
                problems.append(f"{name} has shape {list(found)}, not {list(shape)}")
            elif element not in _ELEMENT_SIZES:
                problems.append(f"{name} has element type {element}")
            else:
                n_bytes[name] = math.prod(shape) * _ELEMENT_SIZES[element]
        if problems:
            raise CheckpointError(_enumerate(problems))
        return n_bytes


def checkpoint_digest(directory: Path) -> str:
    """Tells checkpoints of the same shape apart, by the sizes and samples of their weight files.

    It reads little, so it is no checksum. Raises CheckpointError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(set(_tensor_paths(directory).values())):
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
    """The file of each tensor: as the index says, or all in `model.safetensors`."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{directory} has no model.safetensors and no index of several")
    with _open_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _enumerate(problems: list[str]) -> str:
    rest = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
