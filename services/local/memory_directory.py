"""The directory in memory with the keys and values of a local system's workers.

The files in the directory outlive the workers. When a worker dies, the process that replaces it
uses the dead worker's files. The directory is removed when the system ends. If a system was killed,
its directory stays, until the same user starts another system, which removes it.
"""

import fcntl
import logging
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""The file system of shared memory on Linux."""

_PREFIX = "orcinus-local-"
_OWN = re.compile(_PREFIX + "[a-z0-9_]{8}")
_SUFFIX = ".kv"
"""Ending of the names of all files in a memory directory."""


class MemoryDirectory:
    """A directory in memory that only this user may read. This process holds a lock on the
    directory until `remove` is called or the process ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def make(cls, memory: Path = MEMORY) -> Self | None:
        """Makes a new directory in `memory`, and removes the directories of systems that no longer
        run. Returns None if no directory can be made, for example because `memory` does not
        exist."""
        try:
            for path in memory.iterdir():
                if _OWN.fullmatch(path.name):
                    _remove_if_abandoned(path)
            return cls(*_made(memory))
        except OSError as error:
            log.warning("keys and values end with their workers: %s", error)
            return None

    def remove(self) -> None:
        """Removes the directory and all files in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _made(memory: Path) -> tuple[Path, int]:
    """Makes a directory, and returns its path and the file descriptor that holds its lock. The
    directory is locked before it gets its final name: other systems remove directories with such
    names that are not locked."""
    unnamed = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=memory))  # with mode 0700
    fd = _locked(unnamed)
    assert fd is not None, "a directory that no other process knows is locked"
    return unnamed.rename(memory / unnamed.name.removeprefix(".")), fd


def _remove_if_abandoned(path: Path) -> None:
    """Removes a directory of this user if no process has locked it. Does not remove a directory
    with other files than files of keys and values, because the user may have made it."""
    with suppress(OSError):  # of another user, or just removed
        if path.lstat().st_uid == os.geteuid() and (fd := _locked(path)) is not None:
            if all(file.suffix == _SUFFIX for file in path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


def _locked(path: Path) -> int | None:
    """Locks a directory, and returns the file descriptor that holds the lock. Returns None if
    another process has locked the directory.

    Raises:
        OSError: the path is not a directory that this user may read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
