"""Makes processes that want the same checkpoint take turns, on one machine or on several machines
that share a volume. One process fetches, and the others wait until it has finished."""

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
    """Waits until no other process fetches into `folder`. Then keeps other processes waiting until
    the end of the `with` block. If a process dies, its turn ends.

    Raises:
        SourceError: other processes have not finished within `limit_s`.
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
