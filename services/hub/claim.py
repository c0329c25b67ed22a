"""A checkpoint in a directory that several machines share, such as a volume of a
PersistentVolumeClaim.

    PARENT/.hub/…      the cache, with all states that have been fetched
    PARENT/NAME        a symbolic link to one state, made when the state is complete

A state is the checkpoint at one commit. NAME always leads to one complete state, even if several
processes fetch the checkpoint and some of them die. When a branch on the hub changes, a restarted
pod still reads the state to which NAME leads. Earlier states are kept for processes that still read
them.
"""

import os
import time
from pathlib import Path

from services.hub.source import Fetched, Source

CACHE = ".hub"
POLL_S = 1.0


def cache_of(directory: Path) -> Path:
    """Returns the path of the cache that is in the same parent directory as `directory`."""
    return directory.parent / CACHE


def there(source: Source, directory: Path) -> Fetched | None:
    """Returns the fetched checkpoint if `directory` is a symbolic link to the last fetched state of
    `source`. Returns None otherwise."""
    fetched = source.fetched_in(cache_of(directory))
    if fetched is None or not directory.is_symlink():
        return None
    return fetched if directory.resolve() == fetched.path.resolve() else None


def link(directory: Path, state: Path) -> None:
    """Makes `directory` a symbolic link to `state`, the directory of one fetched state, in one
    atomic step. An earlier link is replaced.

    Raises:
        FileExistsError: the directory exists and is not a symbolic link.
    """
    if directory.exists() and not directory.is_symlink():
        raise FileExistsError(f"{directory} is there, and was not fetched by this command")
    target = os.path.relpath(state, directory.parent)
    new = directory.parent / f".{directory.name}.{os.getpid()}.{time.monotonic_ns()}"
    new.symlink_to(target)
    os.replace(new, directory)


def wait_until_there(source: Source, directory: Path, *, limit_s: float) -> Fetched | None:
    """Waits until another process has fetched a checkpoint, and returns the checkpoint.

    Returns None if the checkpoint is not there after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while (found := there(source, directory)) is None and time.monotonic() < deadline:
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    return found
