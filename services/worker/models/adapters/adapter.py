"""An adapter: a name, and two small matrices for each module of the model that it changes.

A module that an adapter changes computes `base(x) + scale * B @ A @ x`. PEFT stores A, [rank,
n_in], as `base_model.model.{module}.lora_A.weight`, and B, [n_out, rank], as
`base_model.model.{module}.lora_B.weight`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from services.common.adapters import check_name
from services.worker.models.adapters.adapter_config import (
    CONFIG_FILE,
    AdapterError,
    LoraConfig,
    parse_lora_config,
)
from services.worker.models.adapters.adapter_files import (
    WEIGHTS_FILE,
    AdapterFiles,
    digest_of,
)
from services.worker.models.adapters.weights_header import StoredValues, stored_values

ReadFiles = Callable[[Path], AdapterFiles]
"""A function that reads the files of an adapter's directory."""

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

_UNSERVED = {
    "lora_embedding_": "trained embeddings",
    "lora_magnitude_vector": "DoRA",
    "lora_bias": "biases of adapters",
    ".bias": "trained biases",
}
"""Parts of the names of tensors that are refused, and what such tensors contain."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The sizes of the two matrices for a module, and the factor of their product."""

    name: str  # as the adapter spells it
    rank: int
    n_in: int
    n_out: int
    scale: float


class Adapter:
    """An adapter in a directory. Its matrices are not in memory: `read` returns them."""

    def __init__(self, name: str, directory: Path, read: ReadFiles = AdapterFiles.read) -> None:
        """Reads the configuration, and the names and shapes of the tensors. `read` reads the files
        of a directory.

        Raises:
            AdapterError: a file is missing or broken, or the adapter has a feature that is not
                served. The message names the adapter and a file, and no directory.
        """
        self.name = name
        self._read_files = partial(read, directory)
        try:
            check_name(name)
            files = self._read_files()
            config = parse_lora_config(files.config)
            self.modules: Mapping[str, LoraModule] = _modules(_stored(files.weights), config)
        except ValueError as error:
            raise AdapterError(f"adapter {name}: {error}") from error
        self.digest = files.digest
        """Digest of the bytes of the adapter's files."""
        self._keep(files)

    def error(self, message: str) -> AdapterError:
        """Returns an AdapterError with `message`, after the name of this adapter and the name of
        its file of tensors."""
        return AdapterError(f"adapter {self.name}: {WEIGHTS_FILE}: {message}")

    def read(self) -> AdapterTensors:
        """Reads the files again, and returns the tensors.

        Raises:
            AdapterError: a file cannot be read, or has changed since this object was made.
        """
        try:
            files = self._read_files()
        except AdapterError as error:
            raise AdapterError(f"adapter {self.name}: {error}") from error
        if files.digest != self.digest:
            raise AdapterError(f"adapter {self.name}: its files changed while they were read")
        return AdapterTensors(self, _stored(files.weights))

    def _keep(self, files: AdapterFiles) -> None:
        """Keeps nothing: the files would fill the memory until all adapters are loaded."""


class HeldAdapter(Adapter):
    """An adapter whose files are read once, and are in memory as long as this object."""

    def read(self) -> AdapterTensors:
        """Returns the tensors from the files in memory."""
        return AdapterTensors(self, _stored(self._files.weights))

    def _keep(self, files: AdapterFiles) -> None:
        self._files = files


class AdapterTensors:
    """The tensors of an adapter. They were read from files that have the adapter's digest."""

    def __init__(self, adapter: Adapter, stored: Mapping[str, StoredValues]) -> None:
        self._adapter = adapter
        self._stored = stored

    def matrices(self, module: str) -> tuple[Tensor, Tensor]:
        """Returns the matrices A and B of a module, [rank, n_in] and [n_out, rank]. Raises
        AdapterError if a number is not finite."""
        a, b = (
            _tensor(self._stored[f"base_model.model.{module}.lora_{side}.weight"]) for side in "AB"
        )
        if not (a.isfinite().all() and b.isfinite().all()):
            raise self._adapter.error(f"{module} has numbers that are not finite")
        return a, b


def adapter_digest(directory: Path) -> str:
    """Returns a digest of an adapter's configuration and of all bytes of its tensors, without
    holding them in memory. Raises AdapterError if a file cannot be read."""
    paths = [directory / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    try:
        stats = [path.stat() for path in paths]
        return _digest(tuple(paths), tuple((stat.st_ino, stat.st_ctime_ns) for stat in stats))
    except OSError as error:
        raise AdapterError(f"{directory} is no adapter: {error}") from error


@cache
def _digest(paths: tuple[Path, ...], identities: tuple[tuple[int, int], ...]) -> str:
    """Returns the digest of files. It is cached, because a rank needs it twice. `identities`
    (inodes and times of change) make sure that a changed file is read again."""
    contents = []
    for path in paths:
        with path.open("rb") as file:
            contents.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digest_of(*contents)


def _stored(weights: bytes) -> dict[str, StoredValues]:
    """Returns the tensors in the content of a file, by their names. Raises AdapterError if the file
    is broken, a tensor has no floating-point type, or a tensor belongs to a feature that is not
    served."""
    try:
        found = stored_values(weights)
    except ValueError as error:
        raise AdapterError(f"{WEIGHTS_FILE}: {error}") from error
    for key in found:
        _refuse_other(key)
    return found


def _tensor(stored: StoredValues) -> Tensor:
    """Returns a copy of the values of a tensor."""
    if not stored.data:
        return torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
    return torch.frombuffer(bytearray(stored.data), dtype=_DTYPES[stored.dtype]).reshape(
        stored.shape
    )


def _modules(stored: Mapping[str, StoredValues], config: LoraConfig) -> dict[str, LoraModule]:
    """Returns the modules whose matrices are among the tensors, by the modules' names. Raises
    AdapterError if there are other tensors, or if the two matrices of a module do not have the
    configured rank."""
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, one in sorted(stored.items()):
        found = _KEY.fullmatch(key)
        if found is None:
            raise AdapterError(f"{WEIGHTS_FILE}: the tensor {key} is none of a LoRA adapter")
        sides.setdefault(found["module"], {})[found["side"]] = one.shape
    if not sides:
        raise AdapterError(f"{WEIGHTS_FILE} has no tensors")
    return {name: _module(name, shapes, config) for name, shapes in sides.items()}


def _refuse_other(key: str) -> None:
    for part, what in _UNSERVED.items():
        if part in key:
            raise AdapterError(f"{WEIGHTS_FILE}: the tensor {key} is not served: {what}")


def _module(name: str, shapes: Mapping[str, Collection[int]], config: LoraConfig) -> LoraModule:
    rank = config.rank_of(name)
    match (tuple(shapes.get("A", ())), tuple(shapes.get("B", ()))):
        case ((rank_a, n_in), (n_out, rank_b)) if rank_a == rank_b == rank:
            return LoraModule(name, rank, n_in, n_out, config.scale_of(name))
        case (a, b):
            raise AdapterError(
                f"{WEIGHTS_FILE}: {name} has lora_A of {list(a)} and lora_B of {list(b)} where "
                f"{CONFIG_FILE} says rank {rank}"
            )
