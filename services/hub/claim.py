"""A checkpoint in a directory that several machines share, as a claim of Kubernetes is.

    PARENT/.hub/…      the cache, with all states that have been fetched
    PARENT/NAME        a link to one of them, made when that is complete

So what is read under NAME is one state, whole, at any time, however many processes fetch it, and
whichever of them die. What a name has once meant stays: a branch that moves on does not change what
a pod that starts again reads. A state that is no longer linked stays, too, for whoever still reads
it.
"""

import os
import time
from pathlib import Path

from services.hub.source import Fetched, Source

CACHE = ".hub"
POLL_S = 1.0


def cache_of(directory: Path) -> Path:
    """Returns the cache that stands beside a directory."""
    return directory.parent / CACHE


def there(source: Source, directory: Path) -> Fetched | None:
    """Returns what a source meant when it was fetched, if a directory is that; None otherwise."""
    fetched = source.fetched_in(cache_of(directory))
    if fetched is None or not directory.is_symlink():
        return None
    return fetched if directory.resolve() == fetched.path.resolve() else None


def link(directory: Path, state: Path) -> None:
    """Makes a directory a link to a state, in one step, whatever it was linked to before.

    Raises:
        FileExistsError: it is no link.
    """
    if directory.exists() and not directory.is_symlink():
        raise FileExistsError(f"{directory} is there, and was not fetched by this command")
    target = os.path.relpath(state, directory.parent)
    new = directory.parent / f".{directory.name}.{os.getpid()}.{time.monotonic_ns()}"
    new.symlink_to(target)
    os.replace(new, directory)


def wait_until_there(source: Source, directory: Path, *, limit_s: float) -> Fetched | None:
    """Waits until others have fetched a checkpoint, and returns it; None if nobody has within
    `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (found := there(source, directory)) is None and time.monotonic() < deadline:
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    return found
