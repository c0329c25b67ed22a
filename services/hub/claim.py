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

from services.hub.cache import complete_snapshot
from services.hub.name import HubName

CACHE = ".hub"
POLL_S = 1.0


def cache_of(directory: Path) -> Path:
    """Returns the cache that stands beside a directory."""
    return directory.parent / CACHE


def is_there(name: HubName, directory: Path) -> bool:
    """Returns whether a directory is what a name has meant when it was fetched."""
    snapshot = complete_snapshot(name, cache_of(directory))
    return (
        snapshot is not None
        and directory.is_symlink()
        and directory.resolve() == snapshot.resolve()
    )


def link(directory: Path, snapshot: Path) -> None:
    """Makes a directory a link to a state, in one step, whatever it was linked to before.

    Raises:
        FileExistsError: it is no link.
    """
    if directory.exists() and not directory.is_symlink():
        raise FileExistsError(f"{directory} is there, and was not fetched by this command")
    target = os.path.relpath(snapshot, directory.parent)
    new = directory.parent / f".{directory.name}.{os.getpid()}.{time.monotonic_ns()}"
    new.symlink_to(target)
    os.replace(new, directory)


def wait_until_there(name: HubName, directory: Path, *, limit_s: float) -> bool:
    """Waits until others have fetched a checkpoint; returns whether they have, within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (found := is_there(name, directory)) and time.monotonic() < deadline:
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    return found
