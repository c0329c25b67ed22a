"""Converts the events of `watch.proto` to JSON, one object per event. `watch_view.py` adds derived
fields.

Points in time are seconds of wall-clock time since 1970; durations are seconds. Enums are written
as the last words of their names in lower case (`REQUEST_TURN_PUT_DOWN` is "put_down"), and the
kinds of an iteration's spans are one letter each: `p` for prefill, `d` for decode, `r` for
recomputation. Fields that are not set are left out of events about a request, and of marks (events
with a text for people).

A recording is a file of such objects, one per line. Its first line is `HEADER`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from orcinus.v1 import scheduler_pb2, watch_pb2

from services.common.version import VERSION

Json = dict[str, Any]

HEADER: Final[Mapping[str, Any]] = {"type": "recording", "version": 2, "orcinus": VERSION}
"""Object in the first line of a recording."""

_NS = 1e9


def to_json(event: watch_pb2.WatchEvent) -> Json:
    """Returns an event as an object with the fields `t`, `type` and the fields of its type.

    Raises:
        ValueError: the type of the event is unknown.
    """
    kind = event.WhichOneof("event")
    if kind is None:
        raise ValueError("a watch event of no known type")
    return {"t": seconds(event.time_unix_ns), "type": kind} | _TYPES[kind](getattr(event, kind))


def _words(prefix: str, enum: EnumDescriptor) -> dict[int, str]:
    return {value.number: value.name.removeprefix(prefix).lower() for value in enum.values}


_TURNS = _words("REQUEST_TURN_", watch_pb2.RequestTurn.DESCRIPTOR)
_MARKS = _words("MARK_KIND_", watch_pb2.MarkKind.DESCRIPTOR)
_REASONS = _words("COMPLETION_REASON_", scheduler_pb2.CompletionReason.DESCRIPTOR)
_KINDS = {0: "?", 1: "p", 2: "d", 3: "r"}


def seconds(ns: int) -> float:
    """Returns nanoseconds as seconds."""
    return round(ns / _NS, 6)


def _epoch(event: watch_pb2.EpochEvent) -> Json:
    return {field.name: getattr(event, field.name) for field in event.DESCRIPTOR.fields}


def _set_fields(event: Message) -> Json:
    return {
        field.name: list(value) if field.is_repeated else value
        for field, value in event.ListFields()
    }


def _request(event: watch_pb2.RequestEvent) -> Json:
    fields = _set_fields(event) | {"turn": _TURNS[event.turn]}
    if event.turn == watch_pb2.REQUEST_TURN_ADMITTED:
        fields["pipeline"] = event.pipeline
    return fields | {"reason": _REASONS[event.reason]} if event.reason else fields


def _iteration(event: watch_pb2.IterationEvent) -> Json:
    return {
        "pipeline": event.pipeline,
        "epoch": event.epoch,
        "iteration": event.iteration,
        "sent": seconds(event.sent_unix_ns),
        "round_trip_s": seconds(event.round_trip_ns),
        "numbers": list(event.numbers),
        "start_positions": list(event.start_positions),
        "n_tokens": list(event.n_tokens),
        "kinds": "".join([_KINDS[kind] for kind in event.kinds]),
        "n_new_tokens": list(event.n_new_tokens),
        "ended": list(event.ended),
        "n_in_flight": event.n_in_flight,
        "n_waiting": event.n_waiting,
        "n_running": event.n_running,
        # [start, receive, compute, send] in seconds; a start counts from the sending of the plan
        "stages": [
            [seconds(ns) for ns in (s.start_ns, s.receive_ns, s.compute_ns, s.send_ns)]
            for s in event.stages
        ],
    }


def _pool(event: watch_pb2.PoolEvent) -> Json:
    return {
        "waiting": list(event.waiting),
        "n_waiting": event.n_waiting,
        "running": list(event.running),
        "pipelines": list(event.pipelines),
        "accounts": [
            {
                "account": account.account,
                "weight": account.weight,
                "counter": account.counter,
                "n_waiting": account.n_waiting,
                "n_running": account.n_running,
            }
            for account in event.accounts
        ],
    }


def _mark(event: watch_pb2.MarkEvent) -> Json:
    return _set_fields(event) | {"kind": _MARKS[event.kind]}


def _decision(event: watch_pb2.DecisionEvent) -> Json:
    fields: Json = MessageToDict(event, preserving_proto_field_name=True)
    return fields


_TYPES: Mapping[str, Callable[[Any], Json]] = {
    "epoch": _epoch,
    "request": _request,
    "iteration": _iteration,
    "pool": _pool,
    "mark": _mark,
    "decision": _decision,
}
