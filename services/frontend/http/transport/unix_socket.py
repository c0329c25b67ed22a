"""Unix sockets to listen on, and their files."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODE = 0o660
"""Mode of the file of a socket: processes that may write to the file may connect."""


@contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """Yields a socket that is bound to a path, whose file is removed at the end. It accepts
    connections once it is told to listen.

    Raises:
        OSError: a process listens there, there is a file that is not a socket, or no socket can be
        made.
    """
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        bound_at(path, lambda: listener.bind(str(path))),
    ):
        yield listener


@contextmanager
def bound_at(path: Path, bind: Callable[[], object]) -> Iterator[None]:
    """Binds a socket to a path by `bind`, and removes its file at the end.

    Raises:
        OSError: a process listens there, there is a file that is not a socket, or no socket can be
        made.
    """
    try:
        _remove_stale(path)
        bind()
        path.chmod(MODE)
        file = path.stat()
    except OSError as error:
        raise OSError(f"cannot listen on {path}: {error}") from error
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), file):  # it is not yet the file of another process
                path.unlink()


def _remove_stale(path: Path) -> None:
    """Removes the file of a socket on which no process listens; raises OSError if one does."""
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError("there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # the queue of the listener is full
            pass
    raise OSError("another process listens there")
