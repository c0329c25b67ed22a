"""Unix sockets to listen on, and the files of the sockets."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODE = 0o660
"""Mode of the file of a socket. The owner and the group may write to the file, and so may
connect."""


@contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """Yields a Unix socket that is bound to a path. The caller must call `listen` on it. The file
    of the socket is removed when the context ends.

    Raises:
        OSError: another process listens at the path, the path is a file that is not a socket, or
        no socket can be made.
    """
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        bound_at(path, lambda: listener.bind(str(path))),
    ):
        yield listener


@contextmanager
def bound_at(path: Path, bind: Callable[[], object]) -> Iterator[None]:
    """Binds a socket to the path by calling `bind`, for the time of the context. The file of the
    socket is removed when the context ends.

    Raises:
        OSError: another process listens at the path, the path is a file that is not a socket, or
        no socket can be made.
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
            if os.path.samestat(path.stat(), file):  # not replaced by another process's file
                path.unlink()


def _remove_stale(path: Path) -> None:
    """Removes the file of a socket on which no process listens, if there is one at the path. Raises
    OSError if a process listens, or if the file is not a socket."""
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
