"""A rank's share of a stage's tensors, read from a safetensors checkpoint.

Names and shapes are checked before anything is read. Files are mapped, and pages that were read
would stay resident until the file is unmapped, so that is done again and again on the way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.packed_linear import Quantization
from services.common import bounded_file
from services.common.cannot_start import CannotStart
from services.worker.models.mxfp4 import BLOCK, STORED_BYTES, blocks_of, dequantised
from services.worker.models.weights import (
    OnProgress,
    Part,
    Progress,
    TensorSource,
    WantedTensors,
    pieces,
)

_ELEMENT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_BYTES = ("U8",)  # of which MXFP4 is
_MAX_MAPPED_BYTES = 1 << 25  # of what was read, before files are unmapped
_N_SAMPLES = 32  # of each weight file, spread evenly, for its digest
_SAMPLE_BYTES = 4096
_MAX_INDEX_BYTES = 1 << 26  # that of a model with a trillion parameters has a third
_MAX_PROBLEMS = 8  # named in one error; a wrong checkpoint usually has hundreds of the same kind


class CheckpointError(CannotStart):
    """The checkpoint's files are not what its configuration promises; the message names them."""


class CheckpointTensors(TensorSource):
    """The wanted tensors of a checkpoint, in the element type and place wanted."""

    def __init__(
        self,
        directory: Path,
        wanted: WantedTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        quantization: Quantization = "none",
    ) -> None:
        """Checks names and shapes in the files; raises CheckpointError for those not as wanted."""
        super().__init__(wanted.tp_rank, wanted.tp_size, quantization)
        self._dtype = dtype
        self._device = device
        self._places = _places_of(wanted, _tensor_paths(directory), directory)
        self._files = _MappedFiles()
        n_bytes = self._check(wanted)
        self._files.unmap()
        self._progress = Progress(n_bytes, on_progress)

    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _read(self, part: Part, out: Tensor) -> None:
        if part.is_mxfp4:
            self._read_mxfp4(part, out)
            return
        path, name = self._places[part.name]
        element_size = _ELEMENT_SIZES[self._files.slice(path, name, 0).get_dtype()]
        # A row counts whole, since its pages are read whole.
        row_bytes = math.prod(part.shape[1:]) * element_size
        rows, *columns = part.spans
        for begin, end in pieces(len(rows), row_bytes):
            stored = self._files.slice(path, name, (end - begin) * row_bytes)
            index = (range(rows.start + begin, rows.start + end), *columns)
            piece = stored[tuple(slice(span.start, span.stop) for span in index)]
            out[begin:end].copy_(piece)
            self._progress.add(piece.nbytes)

    def _read_mxfp4(self, part: Part, out: Tensor) -> None:
        rows, *middle, columns = part.spans
        blocks = blocks_of(columns)
        first = columns.start - blocks.start * BLOCK
        row_bytes = math.prod(part.shape[1:]) // BLOCK * STORED_BYTES
        for begin, end in pieces(len(rows), row_bytes):
            spans = (range(rows.start + begin, rows.start + end), *middle, blocks)
            index = tuple(slice(span.start, span.stop) for span in spans)
            numbers, scales = (
                self._files.slice(*self._places[name], (end - begin) * row_bytes)[index]
                for name in part.stored
            )
            values = dequantised(numbers, scales, self._dtype)
            out[begin:end].copy_(values[..., first : first + len(columns)])
            self._progress.add(numbers.nbytes + scales.nbytes)

    def _check(self, wanted: WantedTensors) -> int:
        """Returns the bytes in the files of all that is wanted; raises CheckpointError."""
        n_bytes = 0
        problems = []
        for part in wanted.parts:
            for name, shape in part.stored.items():
                header = self._files.slice(*self._places[name], 0)
                found, element = tuple(header.get_shape()), header.get_dtype()
                if found != shape:
                    problems.append(f"{name} has shape {list(found)}, not {list(shape)}")
                elif element not in (_BYTES if part.is_mxfp4 else _ELEMENT_SIZES):
                    problems.append(f"{name} has element type {element}")
                elif not part.is_mxfp4:
                    n_bytes += part.n_elements * _ELEMENT_SIZES[element]
            if part.is_mxfp4:
                *outer, columns = part.spans
                n_bytes += math.prod(map(len, outer)) * len(blocks_of(columns)) * STORED_BYTES
        if problems:
            raise CheckpointError(_enumerate(problems))
        return n_bytes


class _MappedFiles:
    """A checkpoint's files, mapped on demand and unmapped when enough of them is resident."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._n_bytes = 0

    def slice(self, path: Path, name: str, n_bytes: int) -> Any:
        """Returns the tensor `name`, to read `n_bytes` of it; files read before may be unmapped."""
        if self._n_bytes + n_bytes > _MAX_MAPPED_BYTES:
            self.unmap()
        if path not in self._files:
            self._files[path] = _open_file(path)
        self._n_bytes += n_bytes
        try:
            return self._files[path].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def unmap(self) -> None:
        """Closes all files; views of their tensors keep them mapped."""
        self._files.clear()
        self._n_bytes = 0


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
            raise CheckpointError(f"{index} names {_enumerate(wrong)}: no files beside it")
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


def _places_of(
    wanted: WantedTensors, paths: dict[str, Path], directory: Path
) -> dict[str, tuple[Path, str]]:
    """Returns the file of each wanted tensor, and its name there; raises CheckpointError."""
    places = {}
    missing = []
    for name in dict.fromkeys(name for part in wanted.parts for name in part.stored):
        stored = next((each for each in _spellings(name) if each in paths), None)
        if stored is None:
            missing.append(name)
        else:
            places[name] = paths[stored], stored
    if missing:
        raise CheckpointError(f"{directory} lacks {_enumerate(missing)}")
    return places


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


def _enumerate(problems: list[str]) -> str:
    rest = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
