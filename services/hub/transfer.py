"""Transfers many bytes into a directory: checks the free space, uses several connections at once,
and shows the progress."""

import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from services.hub.source import SourceError

_GIB = 1 << 30


class TransferProgress(Protocol):
    """A function that is called with the number of bytes just received. It may raise an error to
    end the transfer."""

    def __call__(self, n_bytes: int) -> None: ...


class _Stopped(Exception):
    """Raised in the threads of a transfer to end them, because the transfer was interrupted."""


def check_space(source: str, directory: Path, n_bytes: int) -> None:
    """Creates a directory, unless it exists. Raises SourceError if its disk has less than `n_bytes`
    bytes free. `source` is the name of the source in the message."""
    directory.mkdir(parents=True, exist_ok=True)
    n_free = shutil.disk_usage(directory).free
    if n_bytes > n_free:
        raise SourceError(
            f"{source}: {n_bytes / _GIB:.2f} GiB are to be fetched, and "
            f"{n_free / _GIB:.2f} GiB are free in {directory}"
        )


def transfer(
    parts: Iterable[Callable[[TransferProgress], None]], *, n_connections: int, n_bytes: int
) -> None:
    """Runs the functions `parts`, each in a thread, at most `n_connections` at a time. Together
    they transfer `n_bytes` bytes. Raises the error of the first part that fails."""
    stopping = threading.Event()
    with _bar(n_bytes) as advance:

        def on_progress(n_bytes: int) -> None:
            if stopping.is_set():
                raise _Stopped
            advance(n_bytes)

        pool = ThreadPoolExecutor(n_connections)
        running = [pool.submit(part, on_progress) for part in parts]
        try:
            for each in wait(running, return_when=FIRST_EXCEPTION).done:
                each.result()
        finally:  # after an error or Ctrl-C, threads end when they receive their next bytes
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _bar(n_bytes: int) -> Iterator[TransferProgress]:
    """Shows the progress of a transfer during the `with` block. Yields a function that must be
    called with each number of bytes received.

    The progress is shown on standard error: as a bar on a terminal, otherwise as a line for each
    tenth of the bytes.
    """
    if sys.stderr.isatty():
        with tqdm(desc="fetching", unit="B", unit_scale=True, total=n_bytes, leave=False) as bar:

            def advance(n_bytes: int) -> None:
                bar.update(n_bytes)

            yield advance
    else:
        yield _Tenths(n_bytes).add


class _Tenths:
    """Writes the progress of a transfer as one line for each tenth of the bytes, for logs."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._n_done = 0
        self._n_said = 0
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        """Adds a number of received bytes, and writes a line for each new tenth."""
        with self._lock:
            self._n_done += n_bytes
            tenths = 10 * self._n_done // max(self._n_bytes, 1)
            if tenths > self._n_said:
                self._n_said = tenths
                sys.stderr.write(
                    f"fetched {self._n_done / _GIB:.2f} of {self._n_bytes / _GIB:.2f} GiB\n"
                )
                sys.stderr.flush()
