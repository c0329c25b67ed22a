"""Checks the events that the clients of a run have recorded, and returns all faults.

The functions are pure. A stream is one choice of one request. The oracle of a stream is the answer
to the same request in an undisturbed system.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class StreamId(NamedTuple):
    """One choice of one request that a client has sent."""

    request: str
    choice: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """An event: a client received tokens. The first token has the position `start` in its
    stream."""

    stream: StreamId
    start: int
    token_ids: tuple[int, ...]
    text: str
    time_s: float


@dataclass(frozen=True, slots=True)
class End:
    """A client was told that a stream is complete, and why."""

    stream: StreamId
    reason: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A client was told an error, or had waited for too long, and gave its request up."""

    stream: StreamId
    error: str
    time_s: float


Event = Tokens | End | Failure


@dataclass(frozen=True, slots=True)
class Expected:
    """A stream as it is when nothing disturbs it."""

    token_ids: tuple[int, ...]
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    stream: StreamId
    kind: str
    """`lost`, `gap`, `duplicate`, `changed`, `ended twice`, `after the end` or `stalled`."""
    detail: str


def check(
    events: Iterable[Event], expected: Mapping[StreamId, Expected], *, max_pause_s: float
) -> list[Violation]:
    """Returns everything that is wrong with the streams in `expected`; events are in the order in
    which each client wrote them."""
    written: dict[StreamId, list[Event]] = defaultdict(list)
    for event in events:
        written[event.stream].append(event)
    unknown = [
        Violation(stream, "changed", "is a stream that nobody asked for")
        for stream in written.keys() - expected.keys()
    ]
    found = (check_stream(stream, written[stream], wanted, max_pause_s=max_pause_s)
             for stream, wanted in expected.items())  # fmt: skip
    return [*unknown, *itertools.chain.from_iterable(found)]


def check_stream(
    stream: StreamId, events: list[Event], expected: Expected, *, max_pause_s: float
) -> list[Violation]:
    """Returns everything that is wrong with one stream."""
    kinds = [
        *_order(events),
        *_positions(events),
        *_content(events, expected),
        *_pauses(events, max_pause_s),
    ]
    return [Violation(stream, kind, detail) for kind, detail in kinds]


def _order(events: list[Event]) -> list[tuple[str, str]]:
    """Checks that there is one end, and nothing after it."""
    failures = [event for event in events if isinstance(event, Failure)]
    n_ends = sum(isinstance(event, End) for event in events)
    found = [("lost", failure.error) for failure in failures]
    if n_ends == 0 and not failures:
        found.append(("lost", "has no end"))
    if n_ends > 1:
        found.append(("ended twice", f"{n_ends} times"))
    if n_ends and not isinstance(events[-1], End):
        found.append(("after the end", str(events[-1])))
    return found


def _positions(events: list[Event]) -> list[tuple[str, str]]:
    """Checks that each position comes once, and in order."""
    found, position = [], 0
    for event in events:
        if isinstance(event, Tokens):
            if event.start > position:
                found.append(("gap", f"{event.start} after {position}"))
            elif event.start < position:
                found.append(("duplicate", f"{event.start} after {position}"))
            position = event.start + len(event.token_ids)
    return found


def _content(events: list[Event], expected: Expected) -> list[tuple[str, str]]:
    """Checks the tokens, the text and the finish reason of a stream. A lost stream is checked up to
    the point where it was lost."""
    pieces = [event for event in events if isinstance(event, Tokens)]
    reasons = [event.reason for event in events if isinstance(event, End)]
    found = []
    for piece in pieces:
        wanted = expected.token_ids[piece.start : piece.start + len(piece.token_ids)]
        if piece.token_ids != wanted:
            found.append(("changed", f"{piece.token_ids} at {piece.start}, not {wanted}"))
    if not reasons:
        return found
    n_tokens = max((piece.start + len(piece.token_ids) for piece in pieces), default=0)
    if n_tokens < len(expected.token_ids):
        found.append(("gap", f"ends after {n_tokens} of {len(expected.token_ids)} tokens"))
    text = "".join(piece.text for piece in pieces)
    if text != expected.text:
        found.append(("changed", f"the text {text!r}, not {expected.text!r}"))
    found += [
        ("changed", f"ends by {reason!r}, not {expected.reason!r}")
        for reason in reasons
        if reason != expected.reason
    ]
    return found


def _pauses(events: list[Event], max_pause_s: float) -> list[tuple[str, str]]:
    """Checks the times between the events of a stream. Before its first token, a stream may have
    waited in the queue."""
    times = [event.time_s for event in events]
    return [
        ("stalled", f"{after - before:.1f} s without news")
        for before, after in itertools.pairwise(times)
        if after - before > max_pause_s
    ]
