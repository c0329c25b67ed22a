"""Computes what viewers of a scheduler's pipelines draw: takes the events of the scheduler and
yields changes. They are computed once for all viewers.

    event → View.take → changes, as objects of JSON → page, console, recordings

A viewer keeps the changes and draws them; all sums are computed here. A change is an event of
`watch_json.py` with fields that are derived from earlier events:

    epoch       has `term`: in a new term, the numbers of requests begin anew; and `text`: the label
                of the epoch, which stays the same if the event is repeated
    iteration   has `n_generated`: each request's number of output tokens after the iteration;
                `first_tokens`: pairs of a request and the seconds from its arrival to its first
                token; and `memory`: how many K/V slots of the pipeline are in each kind of use
    pool        has `n_generated` of the running requests
    mark        (an event for people) has a `text` that names the pipeline, if there have been
                several

In addition there are `figures` (`watch_figures.py`) once per second, unless all pipelines are idle.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from orcinus.v1 import watch_pb2

from services.common.epochs import EPOCHS_PER_TERM
from services.common.watch_figures import Figures, step_of
from services.common.watch_json import Json, seconds, to_json

_DECODE = watch_pb2.SPAN_KIND_DECODE

ENDED_S = 10.0
"""Seconds for which a request is remembered after its end, because events of its last iterations
may arrive later."""


@dataclass(slots=True)
class _Request:
    """The state of a request after the events that the view has taken so far."""

    n_prompt_tokens: int = 0
    n_generated: int = 0
    arrived_at: float | None = None
    """Time at which the request arrived; None if it arrived before the watch began."""
    last_token_at: float | None = None

    def add_tokens(self, n_new: int, *, end_position: int) -> None:
        """Adds the `n_new` output tokens that a request has received from a span of an iteration.
        `end_position` is the position after the span's last token. The number of earlier output
        tokens follows from this position.

        Tokens cannot simply be counted, because there are no events of the iterations that were in
        flight when the watch began.
        """
        if self.n_prompt_tokens:
            n_before = end_position - self.n_prompt_tokens
            self.n_generated = max(self.n_generated, n_before + n_new)
        else:
            self.n_generated += n_new


class View:
    """Keeps the state of a scheduler's pipelines during one watch, and yields its changes. The
    first event of the watch must be an epoch."""

    def __init__(self) -> None:
        self._epochs: dict[int, watch_pb2.EpochEvent] = {}  # the last one of each pipeline
        self._labels: dict[int, str] = {}  # the label of that epoch
        self._term: int | None = None
        self._requests: dict[int, _Request] = {}
        self._ended: deque[tuple[float, int]] = deque()
        self._figures = Figures()

    def take(self, event: watch_pb2.WatchEvent) -> Iterator[Json]:
        """Yields the changes that an event causes in the view, in order.

        Raises:
            ValueError: the type of the event is unknown.
        """
        change = to_json(event)
        at: float = change["t"]
        yield from self.advance(at)
        match change["type"]:
            case "epoch":
                yield change | self._epoch(event.epoch)
            case "request":
                self._take_request(at, event.request)
                yield change
            case "iteration":
                yield change | self._iteration(event.iteration)
            case "pool":
                yield change | self._pool(event.pool)
            case "mark":
                yield change | self._mark(event.mark)
            case _:
                yield change

    def advance(self, now: float) -> Iterator[Json]:
        """Yields the figures that are due at the time `now`, in seconds of the scheduler's
        clock."""
        while self._ended and self._ended[0][0] < now - ENDED_S:
            self._requests.pop(self._ended.popleft()[1], None)
        yield from self._figures.advance(now)

    def _epoch(self, event: watch_pb2.EpochEvent) -> Json:
        term = event.epoch // EPOCHS_PER_TERM
        known = self._epochs.get(event.pipeline)
        if known is not None and known.epoch == event.epoch:
            self._epochs[event.pipeline] = event
            return {"term": term, "text": self._labels[event.pipeline]}
        text = f"{event.epoch}, {event.model} on {event.n_stages} stages"
        if event.pipeline:
            text += f": pipeline {event.pipeline} serves"
        elif self._term is not None:
            text += ": a new pipeline serves"
        if term != self._term:
            self._term = term
            self._requests.clear()
            self._ended.clear()
            self._epochs.clear()
        self._epochs[event.pipeline] = event
        self._labels[event.pipeline] = text
        return {"term": term, "text": text}

    def _take_request(self, at: float, event: watch_pb2.RequestEvent) -> None:
        request = self._request(event.number)
        request.n_prompt_tokens = event.n_prompt_tokens or request.n_prompt_tokens
        request.n_generated = max(request.n_generated, event.n_generated_tokens)
        if event.turn == watch_pb2.REQUEST_TURN_WAITING:
            request.arrived_at = at
        elif event.turn == watch_pb2.REQUEST_TURN_ENDED:
            self._ended.append((at, event.number))

    def _iteration(self, event: watch_pb2.IterationEvent) -> Json:
        sent, duration = seconds(event.sent_unix_ns), seconds(event.round_trip_ns)
        end = sent + duration
        second = self._figures.second(end)
        second.n_iterations += 1
        second.n_spans += len(event.numbers)
        second.n_tokens += sum(event.n_new_tokens)
        second.note_slots(event.pipeline, event.n_allocated_slots)
        first_tokens: list[tuple[int, float]] = []
        n_generated = []
        epoch = self._epochs.get(event.pipeline)
        columns = (event.numbers, event.start_positions, event.n_tokens, event.kinds)
        for number, start, n_tokens, kind, n_new in zip(*columns, event.n_new_tokens, strict=True):
            request = self._request(number)
            if n_new:
                n_run = 1 if kind == _DECODE else n_tokens  # the other tokens are drafts
                request.add_tokens(n_new, end_position=start + n_run)
                if request.last_token_at is not None:
                    second.token_gaps[step_of((end - request.last_token_at) / n_new)] += n_new
                elif request.arrived_at is not None:
                    first_tokens.append((number, round(end - request.arrived_at, 6)))
                request.last_token_at = end
            n_generated.append(request.n_generated)
        second.first_tokens.update(step_of(duration_s) for _, duration_s in first_tokens)
        return {
            "n_generated": n_generated,
            "first_tokens": first_tokens,
            "memory": _memory(event, 0 if epoch is None else epoch.n_slots),
        }

    def _pool(self, event: watch_pb2.PoolEvent) -> Json:
        for number, n_generated in zip(event.running, event.n_generated_tokens, strict=True):
            request = self._request(number)
            request.n_generated = max(request.n_generated, n_generated)
        return {"n_generated": [self._requests[number].n_generated for number in event.running]}

    def _mark(self, event: watch_pb2.MarkEvent) -> Json:
        """Returns the field `text` for the change that the mark `event` causes: the text of the
        mark, preceded by the name of its pipeline. Returns no field if there has been only one
        pipeline, or if the mark belongs to no pipeline. A mark is an event with a text for
        people."""
        of = [number for number, epoch in self._epochs.items() if epoch.epoch == event.epoch]
        if not of or len(self._epochs) == 1:
            return {}
        return {"text": f"pipeline {of[0]}: {event.text}"}

    def _request(self, number: int) -> _Request:
        request = self._requests.get(number)
        if request is None:
            request = self._requests[number] = _Request()
        return request


def _memory(event: watch_pb2.IterationEvent, n_slots: int) -> Json:
    """Returns how many of the pipeline's `n_slots` K/V slots are in each kind of use: used, shared,
    reserved, cached or free."""
    allocated = event.n_allocated_slots
    shared = min(event.n_shared_slots, allocated)
    reserved = max(0, event.n_reserved_slots - allocated)
    return {
        "used": allocated - shared,
        "shared": shared,
        "reserved": reserved,
        "cached": event.n_cached_slots,
        "free": max(0, n_slots - allocated - reserved - event.n_cached_slots),
    }
