"""A checkpoint in a directory that several machines share, such as a claim of Kubernetes.

    PARENT/.hub/…      the cache, with all states that have been fetched
    PARENT/NAME        a link to one of them, made when that is complete

So NAME always shows one complete state, however many processes fetch it, and whichever of them die.
The meaning of a name is kept: when a branch moves on, a pod that starts again reads what it read
before. A state that is no longer linked is kept, too, for processes that still read it.
"""

import os
import time
from pathlib import Path

from services.hub.source import Fetched, Source

CACHE = ".hub"
POLL_S = 1.0


def cache_of(directory: Path) -> Path:
    """Returns the cache beside a directory."""
    return directory.parent / CACHE


def there(source: Source, directory: Path) -> Fetched | None:
    """Returns the fetched checkpoint of a source if `directory` is a link to it; None otherwise."""
    fetched = source.fetched_in(cache_of(directory))
    if fetched is None or not directory.is_symlink():
        return None
    return fetched if directory.resolve() == fetched.path.resolve() else None


def link(directory: Path, state: Path) -> None:
    """Makes a directory a link to a state, in one step, whatever it was linked to before.

    Raises:
        FileExistsError: the directory exists and is no link.
    """
    if directory.exists() and not directory.is_symlink():
        raise FileExistsError(f"{directory} is there, and was not fetched by this command")
    target = os.path.relpath(state, directory.parent)
    new = directory.parent / f".{directory.name}.{os.getpid()}.{time.monotonic_ns()}"
    new.symlink_to(target)
    os.replace(new, directory)


def wait_until_there(source: Source, directory: Path, *, limit_s: float) -> Fetched | None:
    """Waits until another process has fetched a checkpoint, and returns it; None if none has within
    `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (found := there(source, directory)) is None and time.monotonic() < deadline:
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    return found
