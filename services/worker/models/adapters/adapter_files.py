"""The two files of an adapter, read once.

The matrices with which a worker computes and the digest that it reports are made from the same
bytes, also if a file changes while it is read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.regular_file import open_regular
from services.worker.models.adapters.adapter_config import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    AdapterError,
)

WEIGHTS_FILE = "adapter_model.safetensors"

MAX_WEIGHTS_BYTES = 4 << 30
"""Largest size of the file of an adapter's tensors: rank 256 on all linear layers of a model with
70 billion parameters takes 3.4 GB in bfloat16."""

Follow = Callable[[Path], Path]
"""A function that resolves the links of a path, and may check where they lead."""


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _max_weights_bytes(config: bytes) -> int:
    return MAX_WEIGHTS_BYTES


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's configuration and of its tensors."""

    config: bytes
    weights: bytes

    @classmethod
    def read(
        cls,
        directory: Path,
        follow: Follow = _real,
        max_weights_bytes: Callable[[bytes], int] = _max_weights_bytes,
    ) -> AdapterFiles:
        """Reads the files in a directory. `follow` resolves links. `max_weights_bytes` takes the
        content of the configuration, and returns the largest allowed size of the file of tensors,
        in bytes. Raises AdapterError if a file is missing, too large or no regular file. The
        message names the file, but not the directory."""
        config = _content(directory / CONFIG_FILE, MAX_CONFIG_BYTES, follow)
        limit = min(max_weights_bytes(config), MAX_WEIGHTS_BYTES)
        return cls(config, _content(directory / WEIGHTS_FILE, limit, follow))

    @property
    def digest(self) -> str:
        """Digest of both files, in hexadecimal."""
        return digest_of(
            hashlib.sha256(self.config).hexdigest(), hashlib.sha256(self.weights).hexdigest()
        )


def digest_of(config: str, weights: str) -> str:
    """Returns the digest of an adapter from the SHA-256 of its two files, in hexadecimal."""
    lines = f"{config}  {CONFIG_FILE}\n{weights}  {WEIGHTS_FILE}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def _content(path: Path, max_bytes: int, follow: Follow) -> bytes:
    try:
        with open_regular(follow(path)) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes > max_bytes:
                raise AdapterError(f"{path.name} has more than {max_bytes} bytes")
            content = file.read(n_bytes + 1)
    except FileNotFoundError as error:
        raise AdapterError(
            f"{path.name} does not exist (other files, such as .bin, are not read)"
        ) from error
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(content) != n_bytes:
        raise AdapterError(f"{path.name} changed while it was read")
    return content
