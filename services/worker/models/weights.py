"""Where a rank's share of a stage's tensors comes from: a safetensors checkpoint, or chance.

A model is built twice from the same code: first from `WantedTensors`, which records what it asks
for and answers with tensors that have no storage, then from `CheckpointTensors`, which knows by
then how much there is to read and that every tensor is there in the right shape. So a wrong
checkpoint is refused before a single weight has been read, with all that is wrong with it.

Nothing is in memory that the rank does not keep. Of a tensor that ranks share, each reads its own
part. What becomes one tensor (query, key and value; all experts) is read into its place, not
joined afterwards, and of the matrices that are packed one at a time is there twice. Files are
mapped, and pages that were read would stay resident until the file is unmapped, so that is done
again and again on the way.

Knows names, shapes and parts, not what a tensor is for.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.packed_linear import LinearWeight, Quantization, TableWeight, pack, pack_table

LoadFormat = Literal["safetensors", "random"]
OnProgress = Callable[[int, int], None]  # bytes done, bytes total

_ELEMENT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PIECE_BYTES = 1 << 24  # read at once
_MAX_MAPPED_BYTES = 1 << 25  # of what was read, before files are unmapped
_RANDOM_STD = 0.02  # the usual `initializer_range`
_RANDOM_TABLE_SIZE = 1 << 20
_N_SAMPLES = 32  # of each weight file, spread evenly, for its digest
_SAMPLE_BYTES = 4096
_MAX_PROBLEMS = 8  # named in one error; a wrong checkpoint usually has hundreds of the same kind


class CheckpointError(ValueError):
    """The checkpoint's files are not what its configuration promises; the message names them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor whose indices along `dim` are in `span`."""

    dim: int
    span: range


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or a shard of it, as part of one that the model holds."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor as it is stored
    shard: Shard | None = None
    is_transposed: bool = False  # the model wants the transpose of what is stored (two dimensions)

    @property
    def spans(self) -> tuple[range, ...]:
        """The indices that are read, along each dimension as stored."""
        whole = tuple(range(size) for size in self.shape)
        if self.shard is None:
            return whole
        dim = self.shard.dim
        return (*whole[:dim], self.shard.span, *whole[dim + 1 :])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape in which the model gets it."""
        sizes = tuple(len(span) for span in self.spans)
        return sizes[::-1] if self.is_transposed else sizes

    @property
    def n_elements(self) -> int:
        """How many are read."""
        return math.prod(self.out_shape)


class TensorSource(ABC):
    """Where a model takes its tensors from, on behalf of one of the ranks that share them.

    Matrices of layers are of `quantization`, each rank's share by itself.
    """

    def __init__(self, tp_rank: int, tp_size: int, quantization: Quantization = "none") -> None:
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.quantization = quantization

    def tensor(self, name: str, *shape: int, shard: Shard | None = None) -> Tensor:
        """The tensor `name`, which must have that shape, or a shard of it."""
        return self.joined([Part(name, shape, shard)])

    def joined(self, parts: Sequence[Part]) -> Tensor:
        """The parts one after the other along the first dimension; the others must agree."""
        sizes = [part.out_shape[0] for part in parts]
        out = self._allocate((sum(sizes), *parts[0].out_shape[1:]))
        for part, place in zip(parts, torch.split(out, sizes), strict=True):
            self._read(part, place.t() if part.is_transposed else place)
        return out

    def weight(self, parts: Sequence[Part]) -> LinearWeight:
        """The same as a layer's matrix; the plain one is gone when it is packed."""
        return pack(self.joined(parts), self.quantization)

    def head(self, part: Part) -> LinearWeight:
        """The matrix of the head, which is never quantised."""
        return pack(self.joined([part]))

    def table(self, part: Part) -> TableWeight:
        """A matrix to multiply with and to look up in."""
        return pack_table(self.joined([part]))

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Room for a tensor of the model."""

    @abstractmethod
    def _read(self, part: Part, out: Tensor) -> None:
        """Fills `out`, which has the shape of the part as stored."""


class WantedTensors(TensorSource):
    """Remembers what a model asks for."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__(tp_rank, tp_size)
        self.parts: list[Part] = []

    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device="meta")

    def _read(self, part: Part, out: Tensor) -> None:
        self.parts.append(part)


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
        """Checks names and shapes in the files; raises CheckpointError."""
        super().__init__(wanted.tp_rank, wanted.tp_size, quantization)
        self._dtype = dtype
        self._device = device
        self._places = _places_of(wanted, _tensor_paths(directory), directory)
        self._files = _MappedFiles()
        n_bytes = self._check(wanted)
        self._files.unmap()
        self._progress = _Progress(n_bytes, on_progress)

    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _read(self, part: Part, out: Tensor) -> None:
        path, name = self._places[part.name]
        element_size = _ELEMENT_SIZES[self._files.slice(path, name, 0).get_dtype()]
        # A row counts whole, since its pages are read whole.
        row_bytes = math.prod(part.shape[1:]) * element_size
        rows, *columns = part.spans
        for begin, end in _pieces(len(rows), row_bytes):
            stored = self._files.slice(path, name, (end - begin) * row_bytes)
            index = (range(rows.start + begin, rows.start + end), *columns)
            piece = stored[tuple(slice(span.start, span.stop) for span in index)]
            out[begin:end].copy_(piece)
            self._progress.add(piece.nbytes)

    def _check(self, wanted: WantedTensors) -> int:
        """Bytes in the files of all that is wanted."""
        n_bytes = 0
        problems = []
        for part in wanted.parts:
            header = self._files.slice(*self._places[part.name], 0)
            found, element = tuple(header.get_shape()), header.get_dtype()
            if found != part.shape:
                problems.append(f"{part.name} has shape {list(found)}, not {list(part.shape)}")
            elif element not in _ELEMENT_SIZES:
                problems.append(f"{part.name} has element type {element}")
            else:
                n_bytes += part.n_elements * _ELEMENT_SIZES[element]
        if problems:
            raise CheckpointError(_enumerate(problems))
        return n_bytes


class RandomTensors(TensorSource):
    """Random tensors under the names that a model asks for, the same however ranks share them.

    Matrices are normal with a small deviation, norms are ones and biases zeros. A row of a matrix
    is a stretch of one table of random numbers, from a place that is drawn by the tensor's name: so
    a rank makes its part without the rest, as fast as it copies memory.
    """

    def __init__(
        self,
        wanted: WantedTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        quantization: Quantization = "none",
    ) -> None:
        super().__init__(wanted.tp_rank, wanted.tp_size, quantization)
        self._dtype = dtype
        self._device = device
        longest = max((part.shape[-1] for part in wanted.parts), default=0)
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(_RANDOM_TABLE_SIZE, generator=generator) * _RANDOM_STD
        table = table.repeat(1 + -(-longest // _RANDOM_TABLE_SIZE))
        self._table = table.to(device=device, dtype=dtype)
        n_elements = sum(part.n_elements for part in wanted.parts)
        self._progress = _Progress(n_elements * dtype.itemsize, on_progress)

    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _read(self, part: Part, out: Tensor) -> None:
        if len(part.shape) == 1:
            out.fill_(0 if part.name.endswith("bias") else 1)
            self._progress.add(out.nbytes)
            return
        seed = int.from_bytes(hashlib.sha256(part.name.encode()).digest()[:8]) >> 1
        starts = torch.randint(
            _RANDOM_TABLE_SIZE, part.shape[:-1], generator=torch.Generator().manual_seed(seed)
        )
        *row_spans, columns = part.spans
        starts = starts[tuple(slice(span.start, span.stop) for span in row_spans)]
        rows = starts.flatten().to(self._device) + columns.start
        stretches = self._table.unfold(0, max(len(columns), 1), 1)
        flat = out.view(len(rows), -1) if out.dim() > 2 else out  # [n_rows, n_columns]
        for begin, end in _pieces(len(rows), len(columns) * self._dtype.itemsize):
            flat[begin:end].copy_(stretches.index_select(0, rows[begin:end]))
            self._progress.add((end - begin) * len(columns) * self._dtype.itemsize)


class _Progress:
    """Counts bytes and tells how many there are; first of all that there are none."""

    def __init__(self, n_bytes: int, on_progress: OnProgress) -> None:
        self._n_done = 0
        self._n_total = n_bytes
        self._on_progress = on_progress
        on_progress(0, n_bytes)

    def add(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        self._on_progress(self._n_done, self._n_total)


class _MappedFiles:
    """A checkpoint's files, mapped when asked for, unmapped when enough of them is resident."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._n_bytes = 0

    def slice(self, path: Path, name: str, n_bytes: int) -> Any:
        """The tensor `name` to read `n_bytes` of it; what was read before may be unmapped."""
        if self._n_bytes + n_bytes > _MAX_MAPPED_BYTES:
            self.unmap()
        if path not in self._files:
            self._files[path] = _open_file(path)
        self._n_bytes += n_bytes
        return self._files[path].get_slice(name)

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


def _places_of(
    wanted: WantedTensors, paths: dict[str, Path], directory: Path
) -> dict[str, tuple[Path, str]]:
    """The file of each wanted tensor, and its name there.

    Some checkpoints were saved from the model without its head (GPT-2's own, for one): their names
    lack the first word, "transformer." or "model.".
    """
    places = {}
    missing = []
    for name in dict.fromkeys(part.name for part in wanted.parts):
        stored = name if name in paths else name.partition(".")[2]
        if stored in paths:
            places[name] = paths[stored], stored
        else:
            missing.append(name)
    if missing:
        raise CheckpointError(f"{directory} lacks {_enumerate(missing)}")
    return places


def _pieces(n_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts rows into pieces that are not large."""
    size = max(1, _PIECE_BYTES // max(row_bytes, 1))
    for begin in range(0, n_rows, size):
        yield begin, min(begin + size, n_rows)


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _enumerate(problems: list[str]) -> str:
    rest = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
