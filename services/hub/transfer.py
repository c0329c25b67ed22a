"""Many bytes into a directory: whether there is room for them, on several connections at once, and
how far it is."""

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


class Progress(Protocol):
    """Hears how many bytes have come, and may end the transfer by an exception."""

    def __call__(self, n_bytes: int) -> None: ...


class _Stopped(Exception):
    """Ends the threads of a transfer that was interrupted."""


def check_space(source: str, directory: Path, n_bytes: int) -> None:
    """Makes a directory, and raises SourceError if it has no room for so many bytes more."""
    directory.mkdir(parents=True, exist_ok=True)
    n_free = shutil.disk_usage(directory).free
    if n_bytes > n_free:
        raise SourceError(
            f"{source}: {n_bytes / _GIB:.2f} GiB are to be fetched, and "
            f"{n_free / _GIB:.2f} GiB are free in {directory}"
        )


def transfer(
    parts: Iterable[Callable[[Progress], None]], *, n_connections: int, n_bytes: int
) -> None:
    """Runs the parts of a transfer of `n_bytes`, `n_connections` at a time; raises what the first
    of them raises that fails."""
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
        finally:  # after an error or Ctrl-C, threads end with their next bytes, and nobody waits
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _bar(n_bytes: int) -> Iterator[Progress]:
    """A progress bar on standard error, if that is a terminal; else a line for each tenth."""
    if sys.stderr.isatty():
        with tqdm(desc="fetching", unit="B", unit_scale=True, total=n_bytes, leave=False) as bar:

            def advance(n_bytes: int) -> None:
                bar.update(n_bytes)

            yield advance
    else:
        yield _Tenths(n_bytes).add


class _Tenths:
    """Says in lines how far a transfer is, for logs."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._n_done = 0
        self._n_said = 0
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        """Adds bytes that have come."""
        with self._lock:
            self._n_done += n_bytes
            tenths = 10 * self._n_done // max(self._n_bytes, 1)
            if tenths > self._n_said:
                self._n_said = tenths
                sys.stderr.write(
                    f"fetched {self._n_done / _GIB:.2f} of {self._n_bytes / _GIB:.2f} GiB\n"
                )
                sys.stderr.flush()
