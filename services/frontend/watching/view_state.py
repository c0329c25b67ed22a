"""What a viewer that comes later must be told before any news.

The changes of the view are kept as JSON, as they were told, and told again in that form: epochs,
marks and figures of the last minutes, requests that live or have just ended, the last iterations,
and the pool. Each kind is bounded in number and in bytes, and history in time. Times are the
scheduler's.
"""

from collections import deque
from collections.abc import Iterator

from services.common.watch_json import Json

ITERATIONS_S, MAX_ITERATIONS, MAX_ITERATION_BYTES = 60, 500, 768 * 2**10
"""Seconds, number and bytes of the iterations that are kept."""

MARKS_S, MAX_MARKS, MAX_MARK_BYTES = 300, 64, 2**15
"""Seconds, number and bytes of the marks that are kept, and of earlier epochs."""

FIGURES_S, MAX_FIGURES, MAX_FIGURE_BYTES = 300, 300, 2**17
"""Seconds, number and bytes of the figures that are kept."""

MAX_REQUESTS, MAX_TURNS, MAX_REQUEST_BYTES = 2048, 8, 384 * 2**10
"""Maximum number of requests, of turns of each request, and of the bytes of all turns.

A request's first turn, which has all fields, is always kept. A request that has ended is kept as
long as its iterations may be kept.
"""


class History:
    """Changes of the last while, the latest at the end."""

    def __init__(self, max_s: int, max_changes: int, max_bytes: int) -> None:
        self._max_s = max_s
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._changes: deque[tuple[float, bytes]] = deque()

    def add(self, at: float, data: bytes) -> None:
        """Adds the latest change; drops what is too old or too much."""
        self._changes.append((at, data))
        self._n_bytes += len(data)
        while self._changes and not self._fits(at):
            self._n_bytes -= len(self._changes.popleft()[1])

    def __iter__(self) -> Iterator[bytes]:
        return (data for _, data in self._changes)

    def _fits(self, now: float) -> bool:
        return (
            self._changes[0][0] >= now - self._max_s
            and len(self._changes) <= self._max_changes
            and self._n_bytes <= self._max_bytes
        )


class KnownRequests:
    """The turns of requests: first of the requests that have ended, then of those that live."""

    def __init__(self) -> None:
        self._live: dict[int, list[bytes]] = {}
        self._ended: deque[tuple[float, list[bytes]]] = deque()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def __iter__(self) -> Iterator[bytes]:
        for _, turns in self._ended:
            yield from turns
        for turns in self._live.values():
            yield from turns

    def add(self, change: Json, data: bytes) -> None:
        """Adds a turn of a request; drops the oldest requests above the limits, ended ones
        first."""
        at, number = change["t"], change["number"]
        turns = self._live.setdefault(number, [])
        turns.append(data)
        self._n_bytes += len(data)
        if len(turns) > MAX_TURNS:
            self._n_bytes -= len(turns.pop(1))
        if change["turn"] == "ended":
            self._ended.append((at, self._live.pop(number)))
        while self._ended and self._ended[0][0] < at - ITERATIONS_S:
            self._drop(self._ended.popleft()[1])
        while self._n_bytes > MAX_REQUEST_BYTES or len(self) > MAX_REQUESTS:
            if self._ended:
                self._drop(self._ended.popleft()[1])
            else:
                self._drop(self._live.pop(next(iter(self._live))))

    def _drop(self, turns: list[bytes]) -> None:
        self._n_bytes -= sum(map(len, turns))


class ViewState:
    """The state of one watch, which begins empty."""

    def __init__(self) -> None:
        self._epoch: tuple[float, bytes] | None = None
        self._earlier_epochs = History(MARKS_S, MAX_MARKS, MAX_MARK_BYTES)
        self._marks = History(MARKS_S, MAX_MARKS, MAX_MARK_BYTES)
        self._requests = KnownRequests()
        self._iterations = History(ITERATIONS_S, MAX_ITERATIONS, MAX_ITERATION_BYTES)
        self._figures = History(FIGURES_S, MAX_FIGURES, MAX_FIGURE_BYTES)
        self._pool: bytes | None = None

    def add(self, change: Json, data: bytes) -> None:
        """Notes a change that was told, and its JSON; decisions are not kept."""
        at = change["t"]
        match change["type"]:
            case "epoch":
                if self._epoch is not None:
                    self._earlier_epochs.add(*self._epoch)
                self._epoch = at, data
            case "mark":
                self._marks.add(at, data)
            case "request":
                self._requests.add(change, data)
            case "iteration":
                self._iterations.add(at, data)
            case "figures":
                self._figures.add(at, data)
            case "pool":
                self._pool = data

    def told(self) -> Iterator[bytes]:
        """Yields what a new viewer is told, each change as JSON; an epoch is the first."""
        yield from self._earlier_epochs
        if self._epoch is not None:
            yield self._epoch[1]
        yield from self._marks
        yield from self._requests
        yield from self._iterations
        yield from self._figures
        if self._pool is not None:
            yield self._pool
