"""The sources of events: a frontend that streams them, or a recording.

Each source is read in a thread of its own, which puts the events into a queue. If a frontend cannot
be reached, it is called again after a pause. The pauses become longer.
"""

import json
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from services.common.http_api import ApiError, HttpApi

EVENTS_PATH = "/pipeline/events"
MAX_WAITING = 10_000
"""Largest number of events in the queue.

When the queue is full, reading from the source pauses. After a short time a frontend then leaves
out events for this console.
"""
FIRST_BREAK_S = 0.5
MAX_BREAK_S = 15.0
MAX_LINE = 1 << 22
"""Largest number of bytes in a line of a recording."""
TURN_S = 0.2
"""Interval in seconds at which a thread that waits for room in the queue checks whether it must
end."""
_MAY_PASS = frozenset((408, 429))
"""HTTP statuses of refusals that may be temporary. After such a refusal the frontend is called
again."""

Json = dict[str, Any]

END: Final[Json] = {"type": "end"}
"""The last event of every source. It has a field `error` if an error ended the source."""


VERSION = 2
"""The version of the recording format that this module reads."""


class Feed(ABC):
    """A source of events. A thread reads the source from the call of `start` until the call of
    `close`."""

    def __init__(self) -> None:
        self.events: queue.Queue[Json] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_to_end, daemon=True)

    def start(self) -> None:
        """Starts the thread that reads events into the queue `events`."""
        self._thread.start()

    def close(self) -> None:
        """Signals the reading thread to end at the next event. Does not wait for the thread."""
        self._closing.set()

    def _run_to_end(self) -> None:
        try:
            self._run()
        except (OSError, ValueError, ApiError) as error:
            self._put({**END, "error": str(error)})
        else:
            self._put(END)

    @abstractmethod
    def _run(self) -> None:
        """Puts events into the queue until there are no more, or until `close` is called."""

    def _put(self, event: Json) -> bool:
        """Puts an event into the queue, and waits for room if needed. Returns False if `close` was
        called."""
        while not self._closing.is_set():
            try:
                self.events.put(event, timeout=TURN_S)
            except queue.Full:
                continue
            return True
        return False


class LiveFeed(Feed):
    """The events that a frontend streams."""

    def __init__(self, api: HttpApi, *, model: str | None = None) -> None:
        """`model` is the name of the model to watch, or None if the frontend has only one."""
        super().__init__()
        self._api = api
        self._path = (
            EVENTS_PATH if model is None else f"{EVENTS_PATH}?{urlencode({'model': model})}"
        )

    def _run(self) -> None:
        break_s = FIRST_BREAK_S
        is_again = False
        while not self._closing.is_set():
            try:
                with self._api.events(self._path) as events:
                    if is_again:
                        self._put({"type": "gap"})
                    for event in events:
                        break_s, is_again = FIRST_BREAK_S, True
                        if not self._put(event):
                            return
                why = "the stream has ended"
            except ApiError as error:
                if 400 <= error.status < 500 and error.status not in _MAY_PASS:
                    raise
                why = str(error)
            self._put({"type": "away", "text": why})
            self._closing.wait(break_s)
            break_s = min(2 * break_s, MAX_BREAK_S)


class RecordingFeed(Feed):
    """The events of a recording, replayed at `speed` times the pace at which they were recorded.

    With a speed of 0 there are no pauses between events.
    """

    def __init__(self, path: Path, *, speed: float = 1.0) -> None:
        super().__init__()
        self._path = path
        self._speed = speed

    def _run(self) -> None:
        begun, first = time.monotonic(), None
        for event in read_recording(self._path):
            t = event.get("t")
            if self._speed and isinstance(t, int | float):
                first = t if first is None else first
                self._closing.wait(max(0.0, begun + (t - first) / self._speed - time.monotonic()))
            if not self._put(event):
                return


def read_recording(path: Path) -> Iterator[Json]:
    """Yields the events of a recording.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a recording. The message names the wrong line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: line {number} is no JSON: {error}") from error
            if not isinstance(event, dict) or (number == 1 and not _is_header(event)):
                raise ValueError(f"{path}: line {number} is not that of a recording")
            if number > 1:
                yield event


def _is_header(event: Mapping[str, Any]) -> bool:
    return event.get("type") == "recording" and event.get("version") == VERSION
