"""An adapter: a name, and two small matrices for each module of the model that it changes.

A module that an adapter changes computes `base(x) + scale * B @ A @ x`. PEFT stores A, [rank,
n_in], as `base_model.model.{module}.lora_A.weight`, and B, [n_out, rank], likewise.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.adapters import check_name
from services.worker.models.adapters.adapter_config import (
    CONFIG_FILE,
    AdapterError,
    LoraConfig,
    read_lora_config,
)
from services.worker.models.stored_tensor import FLOATS

WEIGHTS_FILE = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

_UNSERVED = {
    "lora_embedding_": "trained embeddings",
    "lora_magnitude_vector": "DoRA",
    "lora_bias": "biases of adapters",
    ".bias": "trained biases",
}
"""Parts of the names of tensors that are refused, and what such tensors contain."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The sizes of the two matrices for a module, and the factor of their product."""

    name: str  # as the adapter spells it
    rank: int
    n_in: int
    n_out: int
    scale: float


class Adapter:
    """An adapter in a directory. Its matrices are not in memory: `matrices` reads them from the
    file."""

    def __init__(self, name: str, directory: Path) -> None:
        """Reads the configuration and the header of the tensors.

        Raises:
            AdapterError: a file is missing or broken, or the adapter has a feature that is not
                served. The message names the adapter.
        """
        self.name = name
        self.digest = adapter_digest(directory)
        """Digest of the adapter's files."""
        self._path = directory / WEIGHTS_FILE
        try:
            check_name(name)
            config = read_lora_config(directory)
            self.modules: Mapping[str, LoraModule] = _modules(self._path, config)
        except ValueError as error:
            raise AdapterError(f"adapter {name}: {error}") from error

    def error(self, message: str) -> AdapterError:
        """Returns an AdapterError with `message`, after the name and the file of this adapter."""
        return AdapterError(f"adapter {self.name}: {self._path}: {message}")

    def matrices(self, module: str) -> tuple[Tensor, Tensor]:
        """Returns the matrices A and B of a module, [rank, n_in] and [n_out, rank]. Raises
        AdapterError if the file cannot be read, or if a number is not finite."""
        found = []
        try:
            with safe_open(self._path, framework="pt", device="cpu") as file:
                for side in "AB":
                    found.append(file.get_tensor(f"base_model.model.{module}.lora_{side}.weight"))
        except (OSError, SafetensorError) as error:
            raise self.error(str(error)) from error
        if not all(bool(each.isfinite().all()) for each in found):
            raise self.error(f"{module} has numbers that are not finite")
        return found[0], found[1]


def adapter_digest(directory: Path) -> str:
    """Returns a digest of an adapter's configuration and of all bytes of its tensors. Raises
    AdapterError if a file cannot be read."""
    paths = [directory / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    try:
        stats = [path.stat() for path in paths]
        return _digest(tuple(paths), tuple((stat.st_ino, stat.st_ctime_ns) for stat in stats))
    except OSError as error:
        raise AdapterError(f"{directory} is no adapter: {error}") from error


@cache
def _digest(paths: tuple[Path, ...], identities: tuple[tuple[int, int], ...]) -> str:
    """Returns the digest of files. A rank needs the digest twice, so it is kept. `identities`
    (inodes and times of change) make sure that a changed file is read again."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{content}  {path.name}\n".encode())
    return digest.hexdigest()


def _modules(path: Path, config: LoraConfig) -> dict[str, LoraModule]:
    """Returns the modules whose matrices are in a file, by the modules' names. Raises AdapterError
    if the file is missing or has other tensors, or if the two matrices of a module do not have the
    configured rank."""
    if not path.is_file():
        raise AdapterError(f"{path} does not exist (other files, such as .bin, are not read)")
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in sorted(file.keys()):
                _refuse_other(path, key)
                found = _KEY.fullmatch(key)
                if found is None:
                    raise AdapterError(f"{path}: the tensor {key} is none of a LoRA adapter")
                shape = _shape(path, key, file.get_slice(key))
                sides.setdefault(found["module"], {})[found["side"]] = shape
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not sides:
        raise AdapterError(f"{path} has no tensors")
    return {name: _module(path, name, shapes, config) for name, shapes in sides.items()}


def _refuse_other(path: Path, key: str) -> None:
    for part, what in _UNSERVED.items():
        if part in key:
            raise AdapterError(f"{path}: the tensor {key} is not served: {what}")


def _shape(path: Path, key: str, found: Any) -> tuple[int, ...]:
    shape, element = tuple(found.get_shape()), str(found.get_dtype())
    if element not in FLOATS:
        raise AdapterError(f"{path}: {key} has element type {element}")
    return shape


def _module(
    path: Path, name: str, shapes: Mapping[str, Collection[int]], config: LoraConfig
) -> LoraModule:
    rank = config.rank_of(name)
    match (tuple(shapes.get("A", ())), tuple(shapes.get("B", ()))):
        case ((rank_a, n_in), (n_out, rank_b)) if rank_a == rank_b == rank:
            return LoraModule(name, rank, n_in, n_out, config.scale_of(name))
        case (a, b):
            raise AdapterError(
                f"{path}: {name} has lora_A of {list(a)} and lora_B of {list(b)} where "
                f"{CONFIG_FILE} says rank {rank}"
            )
