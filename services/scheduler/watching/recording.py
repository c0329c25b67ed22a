"""A recording: a file of JSON lines with all events for watchers, and with decisions.

A thread writes the events, ten times per second, so that a slow disk does not delay the scheduler.
A full disk ends the recording and nothing else. An existing file, of an earlier scheduler, is
renamed and kept.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any

from orcinus.v1 import watch_pb2

from services.common.errors import Unavailable
from services.common.watch_json import HEADER
from services.common.watch_view import View
from services.scheduler.watching.watcher import Watcher
from services.scheduler.watching.watching import Watching

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
"""Maximum size of a recording in bytes."""

MAX_PENDING_BYTES = 64 * 2**20
"""Maximum number of bytes of the events that wait to be written. If more bytes wait, the recording
ends."""

END_BYTES = 512
"""Number of bytes that are reserved for the last line of a recording."""

END_LIMIT_S = 5.0
"""Seconds within which the last events must be written when the scheduler ends."""


class RecordingFull(Exception):
    """Raised when a recording has reached its maximum size."""


class Recording:
    """Writes one recording to a file."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Opens the file. An existing file is renamed to `NAME.1`.

        Raises:
            OSError: the file cannot be opened or renamed.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._view = View()
        if path.is_file():
            path.replace(path.with_name(f"{path.name}.1"))
        self._file: IO[bytes] = path.open("wb")
        self._write_line(HEADER)

    def write(self, message: watch_pb2.WatchResponse) -> None:
        """Writes the events of a message in the form for viewers (`services/common/watch_view.py`):
        one JSON line for each change of what a viewer shows.

        Raises:
            RecordingFull: the file has reached its maximum size. The last line of the file has this
            error.
            OSError: the changes could not be written.
        """
        changes = chain.from_iterable(map(self._view.take, message.events))
        for line in map(_line_of, changes):
            if self._n_bytes + len(line) + END_BYTES > self._max_bytes:
                text = f"the recording has its limit of {self._max_bytes} bytes"
                self.end(text)
                raise RecordingFull(text)
            self._n_bytes += len(line)
            self._file.write(line)
        self._file.flush()

    def end(self, text: str) -> None:
        """Writes `text` as the last line, and closes the file.

        Raises:
            OSError: the line could not be written.
        """
        with self._file:
            self._write_line({"type": "end", "text": text})

    def close(self) -> None:
        """Closes the file without a last line."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write_line(self, value: Mapping[str, Any]) -> None:
        line = _line_of(value)
        self._n_bytes += len(line)
        self._file.write(line)


@contextlib.asynccontextmanager
async def recorded(
    watching: Watching, path: Path, *, max_bytes: int = MAX_BYTES
) -> AsyncIterator[None]:
    """Records all events, with decisions, during the `with` block into the file at `path`.

    Raises:
        OSError: the file cannot be opened.
    """
    recording = await asyncio.to_thread(Recording, path, max_bytes=max_bytes)
    with watching.watch(has_decisions=True, max_pending_bytes=MAX_PENDING_BYTES) as watcher:
        writing = asyncio.create_task(_write(recording, watcher), name="recording")
        try:
            yield
        finally:
            watcher.end("the scheduler stopped")
            try:
                await asyncio.wait_for(writing, END_LIMIT_S)
            except TimeoutError:
                log.warning("the end of the recording could not be written in time")


async def _write(recording: Recording, watcher: Watcher) -> None:
    """Writes events until the watch ends, the file is full or the disk fails."""
    try:
        while True:
            try:
                message = await watcher.next_message()
            except Unavailable as over:
                await asyncio.to_thread(recording.end, over.message)
                return
            await asyncio.to_thread(recording.write, message)
    except RecordingFull as full:
        log.warning("the recording has ended: %s", full)
    except OSError as error:
        log.error("the recording has ended: %s", error)
        recording.close()
    finally:
        watcher.end("nothing more is written")


def _line_of(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
