"""Lets only one process at a time fetch a checkpoint, on one machine or on several machines that
share a volume. Other processes that need the same checkpoint wait until the first one has finished.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.hub.source import Say, SourceError

LIMIT_S = 6 * 3600.0
"""Longest time in seconds for which a process waits for another process to finish."""
POLL_S = 0.5


@contextmanager
def turn_of(folder: Path, *, say: Say, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Locks `folder` for the `with` block, so that no other process fetches into it. Waits at first
    until no other process has the lock. If a process dies, the kernel releases its lock.

    Raises:
        SourceError: other processes have not finished within `limit_s` seconds.
        OSError: the file system cannot lock files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".fetching").open("ab") as file:
        deadline = time.monotonic() + limit_s
        has_said = False
        while not _is_locked(file.fileno()):
            if time.monotonic() > deadline:
                raise SourceError(f"another process has been fetching into {folder} for too long")
            if not has_said:
                say(f"another process fetches into {folder}: waiting for it")
                has_said = True
            time.sleep(POLL_S)
        yield


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
