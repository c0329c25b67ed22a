"""What a viewer who comes later must be told before anything new.

Events are kept as they were told, as JSON, and told again in that form: epochs, marks of the last
minutes, requests that live or have just ended, the last iterations, and the pool. Each kind is
bounded in number and in bytes, and in time where it is history. Time is the events' own.
"""

from collections import deque
from collections.abc import Iterator

from orcinus.v1 import watch_pb2

NS = 10**9

ITERATIONS_S, MAX_ITERATIONS, MAX_ITERATION_BYTES = 60, 500, 768 * 2**10
"""Seconds, number and bytes of the iterations that are kept."""

MARKS_S, MAX_MARKS, MAX_MARK_BYTES = 300, 64, 2**15
"""Seconds, number and bytes of the marks that are kept, and of earlier epochs."""

MAX_REQUESTS, MAX_TURNS, MAX_REQUEST_BYTES = 2048, 8, 384 * 2**10
"""Number of requests that are kept, turns of each, and bytes of all. A request's first turn, which
has all fields, always stays; one that has ended stays as long as its iterations may."""


class History:
    """Events of the last while, the latest at the end."""

    def __init__(self, seconds: int, max_events: int, max_bytes: int) -> None:
        self._ns = seconds * NS
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._events: deque[tuple[int, bytes]] = deque()

    def add(self, time_ns: int, data: bytes) -> None:
        """Adds the latest event; drops what is too old or too much."""
        self._events.append((time_ns, data))
        self._n_bytes += len(data)
        while self._events and not self._fits(time_ns):
            self._n_bytes -= len(self._events.popleft()[1])

    def __iter__(self) -> Iterator[bytes]:
        return (data for _, data in self._events)

    def _fits(self, now_ns: int) -> bool:
        return (
            self._events[0][0] >= now_ns - self._ns
            and len(self._events) <= self._max_events
            and self._n_bytes <= self._max_bytes
        )


class KnownRequests:
    """The turns of requests: of those that have ended, then of those that live."""

    def __init__(self) -> None:
        self._live: dict[int, list[bytes]] = {}
        self._ended: deque[tuple[int, list[bytes]]] = deque()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def __iter__(self) -> Iterator[bytes]:
        for _, turns in self._ended:
            yield from turns
        for turns in self._live.values():
            yield from turns

    def add(self, time_ns: int, event: watch_pb2.RequestEvent, data: bytes) -> None:
        """Adds a turn; drops what is too old or too much, ended requests first."""
        turns = self._live.setdefault(event.number, [])
        turns.append(data)
        self._n_bytes += len(data)
        if len(turns) > MAX_TURNS:
            self._n_bytes -= len(turns.pop(1))
        if event.turn == watch_pb2.REQUEST_TURN_ENDED:
            self._ended.append((time_ns, self._live.pop(event.number)))
        while self._ended and self._ended[0][0] < time_ns - ITERATIONS_S * NS:
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
        self._epoch: tuple[int, bytes] | None = None
        self._earlier_epochs = History(MARKS_S, MAX_MARKS, MAX_MARK_BYTES)
        self._marks = History(MARKS_S, MAX_MARKS, MAX_MARK_BYTES)
        self._requests = KnownRequests()
        self._iterations = History(ITERATIONS_S, MAX_ITERATIONS, MAX_ITERATION_BYTES)
        self._pool: bytes | None = None

    def add(self, event: watch_pb2.WatchEvent, data: bytes) -> None:
        """Notes an event that was told; decisions are not kept."""
        time_ns = event.time_unix_ns
        match event.WhichOneof("event"):
            case "epoch":
                if self._epoch is not None:
                    self._earlier_epochs.add(*self._epoch)
                self._epoch = time_ns, data
            case "mark":
                self._marks.add(time_ns, data)
            case "request":
                self._requests.add(time_ns, event.request, data)
            case "iteration":
                self._iterations.add(time_ns, data)
            case "pool":
                self._pool = data

    def told(self) -> Iterator[bytes]:
        """Yields what a new viewer is told, each event as JSON; an epoch is the first."""
        yield from self._earlier_epochs
        if self._epoch is not None:
            yield self._epoch[1]
        yield from self._marks
        yield from self._requests
        yield from self._iterations
        if self._pool is not None:
            yield self._pool
