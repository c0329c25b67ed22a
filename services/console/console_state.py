"""The state that a console shows of the pipelines, computed from events.

The module reads no clock: each event carries its time. Most events are the changes that
`services/common/watch_view.py` makes. Three events are about the stream itself:

    gap     the stream has left out some changes, and then repeats the present state
    here    a scheduler is watched again, and the stream then repeats the present state
    away    no scheduler is watched now; `text` is the reason

A state is repeated as all events of one type, then all events of the next type. So an event may be
older than the event before it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]

KEPT_S = 120.0
"""Seconds for which an iteration is remembered after its end."""
MAX_ITERATIONS = 20_000
MAX_MARKS = 50
MAX_REQUESTS = 4096
ENDED_S = 4.0
"""Seconds for which a request is shown after its end."""
CONNECTING = "connecting"
NO_FIGURES: Json = {"tokens_per_s": 0.0, "batch_size": 0.0}


@dataclass(slots=True)
class RequestRow:
    """The state of a request that a row of the console shows."""

    number: int
    turn: str = "waiting"
    request_id: str = ""
    n_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    n_generated_tokens: int = 0
    n_cached_tokens: int = 0
    priority: int = 0
    account: str = ""
    reason: str = ""
    pipeline: int = 0
    """Number of the pipeline that admitted the request most recently."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class DrawnIteration:
    """An iteration, with the properties that the console shows."""

    number: int
    sent: float
    round_trip_s: float
    request: int
    """Number of the request with the most tokens in the iteration; 0 if there is none."""
    kind: str
    """Kind of work on the request `request`: `p` (prefill), `d` (decode) or `r` (recomputation)."""
    computing: tuple[tuple[float, float], ...]
    """For each stage, the times in seconds at which the stage began and ended the computation of
    the iteration."""
    pipeline: int = 0
    """Number of the pipeline that ran the iteration."""

    @property
    def ended(self) -> float:
        """Time at which the scheduler received the result of the iteration."""
        return self.sent + self.round_trip_s


@dataclass(frozen=True, slots=True)
class PipelineMark:
    """A notable event of the pipeline, such as a new epoch, with its time and a text."""

    t: float
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


@dataclass(frozen=True, slots=True)
class KvSlots:
    """The number of K/V slots in each kind of use. The sum is the number of all slots."""

    shared: int = 0
    used: int = 0
    reserved: int = 0
    """Slots that are set aside for requests and have no keys and values yet."""
    cached: int = 0
    free: int = 0

    def __add__(self, other: "KvSlots") -> "KvSlots":
        return KvSlots(
            shared=self.shared + other.shared,
            used=self.used + other.used,
            reserved=self.reserved + other.reserved,
            cached=self.cached + other.cached,
            free=self.free + other.free,
        )


@dataclass(slots=True)
class ServingPipeline:
    """The state of one pipeline that serves."""

    epoch: Json
    """The pipeline's `epoch` event, without its fields `type` and `t`."""
    kv: KvSlots
    n_running: int = 0
    n_in_flight: int = 0

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return int(self.epoch.get("n_stages", 0))


@dataclass(slots=True)
class ConsoleState:
    """The state of all pipelines as far as a console shows it. Each event given to `feed` updates
    the state."""

    epoch: dict[str, Any] = field(default_factory=dict)
    """The last `epoch` event, without its fields `type` and `t`. Empty before the first event."""
    away: str = CONNECTING
    """Reason why no scheduler is watched now; empty while a scheduler is watched."""
    pipelines: dict[int, ServingPipeline] = field(default_factory=dict)
    """The pipelines that serve, by number. If no pipeline serves, this is only the pipeline that
    was lost last."""
    now: float = 0.0
    """Time of the latest event."""
    requests: dict[int, RequestRow] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    n_waiting: int = 0
    accounts: tuple[Json, ...] = ()
    figures: Json = field(default_factory=lambda: NO_FIGURES)
    """Figures about the last seconds, such as throughput and batch size."""
    iterations: deque[DrawnIteration] = field(default_factory=lambda: deque(maxlen=MAX_ITERATIONS))
    marks: deque[PipelineMark] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    n_marks: int = 0
    """Number of all marks so far, including marks that are no longer kept."""

    def feed(self, event: Json) -> None:
        """Updates the state with an event. Ignores events of unknown types.

        Raises:
            ValueError: a field is missing or wrong.
        """
        kind = event.get("type")
        take = _TAKERS.get(str(kind))
        if take is None:
            return
        try:
            if kind not in _OF_THE_STREAM:  # events of the stream have times of another clock
                self.now = max(self.now, float(event.get("t", self.now)))
                self.away = ""
            take(self, event)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"a broken event of type {kind!r}: {error!r}") from error
        self._forget()

    @property
    def n_running(self) -> int:
        """Number of requests that run, in all pipelines."""
        return sum(pipeline.n_running for pipeline in self.pipelines.values())

    @property
    def n_in_flight(self) -> int:
        """Number of batches in flight, in all pipelines."""
        return sum(pipeline.n_in_flight for pipeline in self.pipelines.values())

    @property
    def kv(self) -> KvSlots:
        """K/V slots of all pipelines."""
        return sum((pipeline.kv for pipeline in self.pipelines.values()), KvSlots())

    def shown_requests(self) -> Sequence[RequestRow]:
        """Returns the requests in the order in which a table shows them.

        Running requests come first, then waiting requests, both in the order of the scheduler's
        pool. They are followed by requests that no pool event has named yet. Requests that have
        just ended come last.
        """
        placed = {number: place for place, number in enumerate((*self.running, *self.waiting))}

        def key(row: RequestRow) -> tuple[bool, int, int]:
            return row.ended_at is not None, placed.get(row.number, len(placed)), row.number

        return sorted(self.requests.values(), key=key)

    def _row(self, number: int) -> RequestRow:
        if number not in self.requests:
            self.requests[number] = RequestRow(number)
        return self.requests[number]

    def _mark(self, t: float, kind: str, text: str) -> None:
        mark = PipelineMark(t, _printable(kind), _printable(text))
        if mark not in self.marks:  # a repeated event adds no mark
            self.marks.append(mark)
            self.n_marks += 1

    def _begin_anew(self) -> None:
        """Forgets all requests, iterations and pipelines, because the stream is about to repeat the
        present ones."""
        self.now = 0.0
        self.requests.clear()
        self.iterations.clear()
        self.pipelines.clear()
        self.waiting = self.running = ()
        self.n_waiting = 0

    def _forget(self) -> None:
        while self.iterations and self.iterations[0].ended < self.now - KEPT_S:
            self.iterations.popleft()
        for row in [it for it in self.requests.values() if it.ended_at is not None]:
            if row.ended_at is not None and row.ended_at < self.now - ENDED_S:
                del self.requests[row.number]
        while len(self.requests) > MAX_REQUESTS:
            del self.requests[next(iter(self.requests))]

    def _take_epoch(self, event: Json) -> None:
        if self.epoch and self.epoch["term"] != event["term"]:
            self.requests.clear()
            self.pipelines.clear()
        self.epoch = {key: _printable(it) for key, it in event.items() if key not in ("t", "type")}
        known = self.pipelines.get(_pipeline_of(event))
        if known is not None and known.epoch["epoch"] == event["epoch"]:
            known.epoch = self.epoch
            return
        self._mark(float(event["t"]), "epoch", str(event["text"]))
        slots = KvSlots(free=int(event["n_slots"]))
        self.pipelines[_pipeline_of(event)] = ServingPipeline(self.epoch, slots)

    def _take_request(self, event: Json) -> None:
        row = self._row(int(event.get("number", 0)))
        for name in _ROW_FIELDS & event.keys():
            setattr(row, name, _printable(event[name]))
        if row.turn == "ended":
            row.ended_at = float(event["t"])

    def _take_iteration(self, event: Json) -> None:
        for number, n in zip(event["numbers"], event["n_generated"], strict=True):
            if number in self.requests:
                self.requests[number].n_generated_tokens = int(n)
        self.iterations.append(_iteration(event))
        self.n_waiting = int(event["n_waiting"])
        pipeline = self.pipelines.get(_pipeline_of(event))
        if pipeline is not None:
            pipeline.n_in_flight = int(event["n_in_flight"])
            pipeline.n_running = int(event["n_running"])
            pipeline.kv = KvSlots(**{name: int(n) for name, n in event["memory"].items()})

    def _take_pool(self, event: Json) -> None:
        self.waiting = tuple(map(int, event["waiting"]))
        self.running = tuple(map(int, event["running"]))
        self.n_waiting = int(event["n_waiting"])
        self.accounts = tuple(event.get("accounts", ()))
        for number in self.waiting:
            self._row(number)
        runs_in = tuple(map(int, event.get("pipelines") or (0,) * len(self.running)))
        for number, n, pipeline in zip(self.running, event["n_generated"], runs_in, strict=True):
            row = self._row(number)
            row.n_generated_tokens = int(n)
            row.turn = "admitted"
            row.pipeline = pipeline
        for of, serving in self.pipelines.items():
            serving.n_running = runs_in.count(of)
            if not serving.n_running:
                serving.n_in_flight = 0

    def _take_figures(self, event: Json) -> None:
        self.figures = {name: float(event["recent"][name]) for name in NO_FIGURES}

    def _take_mark(self, event: Json) -> None:
        if event["kind"] in ("lost", "left"):
            of = event.get("epoch")
            left = {key: it for key, it in self.pipelines.items() if it.epoch["epoch"] != of}
            self.pipelines = left or self.pipelines
        numbers = event.get("numbers", ())
        whom = f" (requests {', '.join(map(str, numbers))})" if numbers else ""
        self._mark(float(event["t"]), str(event["kind"]), str(event.get("text", "")) + whom)

    def _take_gap(self, event: Json) -> None:
        self._mark(self.now, "gap", "some events were missed")
        self._begin_anew()

    def _take_away(self, event: Json) -> None:
        text = _printable(str(event.get("text", ""))) or "no scheduler is watched"
        if text != self.away:
            self._mark(self.now, "away", text)
        self.away = text

    def _take_here(self, event: Json) -> None:
        if self.away not in ("", CONNECTING):
            self._mark(self.now, "here", "")
        self.away = ""
        self._begin_anew()


_OF_THE_STREAM = frozenset(("gap", "away", "here"))
_ROW_FIELDS = frozenset(RequestRow.__dataclass_fields__) - {"number", "ended_at"}
_TAKERS: Mapping[str, Callable[[ConsoleState, Json], None]] = {
    "epoch": ConsoleState._take_epoch,
    "request": ConsoleState._take_request,
    "iteration": ConsoleState._take_iteration,
    "pool": ConsoleState._take_pool,
    "mark": ConsoleState._take_mark,
    "figures": ConsoleState._take_figures,
    "gap": ConsoleState._take_gap,
    "away": ConsoleState._take_away,
    "here": ConsoleState._take_here,
}


def _printable(value: Any) -> Any:
    """Returns `value` unchanged, unless it is a text. In a text, replaces each unprintable
    character by a middle dot.

    Unprintable characters could be commands to the terminal.
    """
    if not isinstance(value, str):
        return value
    return "".join([letter if letter.isprintable() else "\N{MIDDLE DOT}" for letter in value])


def _pipeline_of(event: Json) -> int:
    """Returns the number of an event's pipeline, or 0 if the event has no number, as in recordings
    of a single pipeline."""
    return int(event.get("pipeline", 0))


def _iteration(event: Json) -> DrawnIteration:
    sent = float(event["sent"])
    spans = [*zip(event["n_tokens"], event["numbers"], event["kinds"], strict=True)]
    # Of several requests with the most tokens, `max` returns the first in the batch, which is the
    # request that has run longest.
    _, number, kind = max(spans, key=lambda span: int(span[0]), default=(0, 0, "d"))
    return DrawnIteration(
        number=int(event["iteration"]),
        sent=sent,
        round_trip_s=float(event["round_trip_s"]),
        request=int(number),
        kind=str(kind),
        computing=tuple(
            (sent + float(start), sent + float(start) + float(compute))
            for start, _, compute, _ in event["stages"]
        ),
        pipeline=_pipeline_of(event),
    )
