"""Keeps the recent changes of what viewers see, so that a new viewer gets them before any newer
change.

Changes are kept as the JSON that was sent to earlier viewers: the last iterations, requests that
have not ended or have just ended, the pool, and the epochs, marks (events such as the loss of a
pipeline) and figures of the last minutes. Each kind is bounded in number and in bytes, and epochs,
marks, figures and iterations also in age. Times are readings of the scheduler's clock.
"""

from collections import deque
from collections.abc import Iterator

from services.common.epochs import EPOCHS_PER_TERM
from services.common.watch_json import Json

ITERATIONS_S, MAX_ITERATIONS, MAX_ITERATION_BYTES = 60, 500, 768 * 2**10
"""Limits on the iterations that are kept: largest age in seconds, largest number, and largest size
in bytes."""

MARKS_S, MAX_MARKS, MAX_MARK_BYTES = 300, 64, 2**15
"""Limits on the marks (events such as the loss of a pipeline), and on the earlier epochs, that are
kept: largest age in seconds, largest number, and largest size in bytes."""

FIGURES_S, MAX_FIGURES, MAX_FIGURE_BYTES = 300, 300, 2**17
"""Limits on the `figures` changes (totals and rates, one change per second) that are kept: largest
age in seconds, largest number, and largest size in bytes."""

MAX_REQUESTS, MAX_TURNS, MAX_REQUEST_BYTES = 2048, 8, 384 * 2**10
"""Limits on the requests that are kept: largest number of requests, largest number of turns
(changes of state) of each, and largest size of all turns in bytes. A request's first turn, which
has all fields, is always kept. A request that has ended is kept as long as its iterations may be
kept."""


class History:
    """Keeps the recent changes of one kind, oldest first, within limits of age, number and size."""

    def __init__(self, max_s: int, max_changes: int, max_bytes: int) -> None:
        self._max_s = max_s
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._changes: deque[tuple[float, bytes]] = deque()

    def add(self, at: float, data: bytes) -> None:
        """Adds the latest change. Drops the oldest changes if a limit is exceeded."""
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
    """Keeps the turns (changes of state) of requests. Iteration yields the turns of requests that
    have ended before the turns of requests that still run."""

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
        """Adds a turn (a change of state) of a request. A request with more than MAX_TURNS turns
        loses its second turn. If another limit is exceeded, drops the oldest requests, first those
        that have ended."""
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


class KnownEpochs:
    """Keeps the epochs of the pipelines that serve, and earlier epochs. Iteration yields earlier
    epochs first. If no pipeline serves, the epoch of the pipeline that was lost last is kept."""

    def __init__(self) -> None:
        self._serving: dict[int, tuple[Json, bytes]] = {}  # by the number of the pipeline
        self._earlier = History(MARKS_S, MAX_MARKS, MAX_MARK_BYTES)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._earlier
        for _, data in self._serving.values():
            yield data

    def add(self, change: Json, data: bytes) -> None:
        """Adds an epoch. The epoch replaces the current epoch of its pipeline, and all current
        epochs of other terms (periods in which one scheduler leads). Replaced epochs are kept as
        earlier epochs."""
        for pipeline, (epoch, _) in list(self._serving.items()):
            if pipeline == change["pipeline"] or _term_of(epoch) != _term_of(change):
                replaced, its_data = self._serving.pop(pipeline)
                if epoch["epoch"] != change["epoch"]:
                    self._earlier.add(replaced["t"], its_data)
        self._serving[change["pipeline"]] = change, data

    def end(self, number: int) -> None:
        """Removes the epoch `number`, which is over. Keeps it if no other pipeline has an epoch."""
        left = {one: it for one, it in self._serving.items() if it[0]["epoch"] != number}
        self._serving = left or self._serving


def _term_of(epoch: Json) -> int:
    number: int = epoch["epoch"]
    return number // EPOCHS_PER_TERM


class ViewState:
    """Keeps the recent changes since the frontend began to watch the scheduler. From these changes,
    a viewer that connects later can draw the present state. A new object is empty."""

    def __init__(self) -> None:
        self._epochs = KnownEpochs()
        self._marks = History(MARKS_S, MAX_MARKS, MAX_MARK_BYTES)
        self._requests = KnownRequests()
        self._iterations = History(ITERATIONS_S, MAX_ITERATIONS, MAX_ITERATION_BYTES)
        self._figures = History(FIGURES_S, MAX_FIGURES, MAX_FIGURE_BYTES)
        self._pool: bytes | None = None

    def add(self, change: Json, data: bytes) -> None:
        """Keeps a change for viewers that connect later. `change` is the object, and `data` the
        JSON of it that was sent to the present viewers. Decisions of the scheduling core are not
        kept."""
        at = change["t"]
        match change["type"]:
            case "epoch":
                self._epochs.add(change, data)
            case "mark":
                self._marks.add(at, data)
                if change["kind"] in ("lost", "left"):
                    self._epochs.end(change.get("epoch", 0))
            case "request":
                self._requests.add(change, data)
            case "iteration":
                self._iterations.add(at, data)
            case "figures":
                self._figures.add(at, data)
            case "pool":
                self._pool = data

    def told(self) -> Iterator[bytes]:
        """Yields the kept changes, each as JSON, for a viewer that has just connected. The epochs
        come first."""
        yield from self._epochs
        yield from self._marks
        yield from self._requests
        yield from self._iterations
        yield from self._figures
        if self._pool is not None:
            yield self._pool
