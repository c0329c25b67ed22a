"""A directory in which ranks keep their packed matrices, so that the next start maps them into
memory instead of packing them again.

There is a file for each share of a checkpoint. Its name is a digest of everything that the bytes
depend on: the weight files, the rank's place and settings, the code, and the layout of the native
library. A file is written under another name and then renamed, so a file with its final name is
complete. The oldest files are removed to make room for new ones. If the directory cannot be read or
written, this is logged, and weights are loaded without the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar, cast

from kernels.packing.stored import StoredMatrix, from_stored, layout, to_stored
from services.worker.models.packed_file import (
    DamagedFileError,
    read_packed,
    size_of,
    write_packed,
)

log = logging.getLogger(__name__)

LOCKED_S = 60.0
"""An incomplete file that no process has locked is removed when it has not changed for this number
of seconds."""

_SUFFIX = ".packed"
_OWN = re.compile(r"[0-9a-f]{32}\.packed(\.\w+)?")
"""Pattern of the names of a cache's files, complete or not. Other files in the directory are left
alone, as they may be a user's."""
_Matrix = TypeVar("_Matrix")


class WeightCache:
    """The cache in a directory, whose files have at most `max_bytes` bytes together.

    `build` identifies the code: files of other code are not read. `run` calls the function that
    writes a file: at once, or in a thread (`in_background`), so that a rank need not wait for a
    slow volume.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        build: str,
        run: Callable[[Callable[[], None]], None] = lambda write: write(),
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._build = build
        self._run = run

    def share(self, *facts: str) -> CachedShare:
        """Returns the cached matrices of a rank's share of a checkpoint, or an empty share if none
        are cached. `facts` are texts that identify the share, such as a digest of the files."""
        key = hashlib.sha256(repr((self._build, layout(), facts)).encode()).hexdigest()[:32]
        path = self._directory / f"{key}{_SUFFIX}"
        return CachedShare(
            self._read(path), lambda matrices: self._run(lambda: self._write(path, matrices))
        )

    def _read(self, path: Path) -> Mapping[str, StoredMatrix]:
        try:
            matrices = read_packed(path)
        except FileNotFoundError:
            return {}
        except (DamagedFileError, OSError) as error:
            log.warning("%s is not used, and weights are packed again: %s", path, error)
            return {}
        with suppress(OSError):  # of a directory that is read-only
            os.utime(path)  # the file is the newest now
        log.info("%d packed matrices are mapped from %s", len(matrices), path)
        return matrices

    def _write(self, path: Path, matrices: Mapping[str, StoredMatrix]) -> None:
        n_bytes = size_of(matrices)
        if n_bytes > self._max_bytes:
            log.warning("packed weights of %d bytes exceed weight_cache_bytes", n_bytes)
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._make_room(n_bytes)
            _replace(path, matrices)
            self._make_room(0)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self._directory, error)
            return
        log.info("packed weights are kept in %s: %d bytes", path, n_bytes)

    def _make_room(self, n_bytes: int) -> None:
        """Removes incomplete files that no process writes any more, and then the oldest files until
        `n_bytes` more bytes fit."""
        files = []
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # another rank has renamed or removed it
                if not _OWN.fullmatch(path.name):
                    continue
                if path.suffix != _SUFFIX and _is_abandoned(path):
                    path.unlink()
                else:
                    files.append((path, path.stat()))
        total = sum(stat.st_size for _, stat in files) + n_bytes
        for path, stat in sorted(files, key=lambda entry: entry[1].st_mtime_ns):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size


def in_background(write: Callable[[], None]) -> None:
    """Runs `write` in a thread. The process may end before the thread has ended. A later writer
    then removes the incomplete file."""
    threading.Thread(target=write, name="weight cache", daemon=True).start()


class CachedShare:
    """The quantised matrices of a rank's share: from the cache's file, or newly made. `keep` writes
    a new file if any matrix was newly made."""

    def __init__(
        self,
        found: Mapping[str, StoredMatrix],
        write: Callable[[Mapping[str, StoredMatrix]], None],
    ) -> None:
        self._found = found
        self._write = write
        self._made: dict[str, StoredMatrix] = {}

    def has(self, name: str) -> bool:
        """Returns whether the file has the matrix `name`."""
        return name in self._found

    def matrix(self, name: str, make: Callable[[], _Matrix]) -> _Matrix:
        """Returns the matrix `name` from the cache's file. If the file does not have it, returns
        the result of `make`."""
        if name in self._found:
            return cast(_Matrix, from_stored(self._found[name]))
        made = make()
        stored = to_stored(made)
        if stored is not None:
            self._made[name] = stored
        return made

    def keep(self) -> None:
        """Writes all matrices to the cache's file, if any of them was not in the file."""
        if self._made:
            self._write({**self._found, **self._made})


def _replace(path: Path, matrices: Mapping[str, StoredMatrix]) -> None:
    """Writes `matrices` to a new file in the directory of `path`, and renames this file to `path`
    when it is complete."""
    with NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        unfinished = Path(file.name)
        try:
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            write_packed(file, matrices)
            file.flush()
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    """Returns whether no process writes an incomplete file any more: the file has not changed for
    LOCKED_S seconds, and is not locked. A writer locks its file soon after it has created the file.
    """
    if time.time() - path.stat().st_mtime < LOCKED_S:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
