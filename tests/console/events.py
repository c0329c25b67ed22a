"""Events of a scheduler that tell a short story, and the events that a console receives for them.

There are two stages and three requests. One request joins late, and one ends early.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orcinus.v1 import scheduler_pb2, watch_pb2

from services.common.watch_json import HEADER, Json
from services.common.watch_view import View

T = 1_790_000_000.0
"""When it begins, in seconds since 1970."""
NS = 10**9

Event = watch_pb2.WatchEvent


def event(at: float, **fields: Any) -> Event:
    """Returns an event `at` seconds after the beginning."""
    return Event(time_unix_ns=round((T + at) * NS), **fields)


def told(*events: Event | Json) -> list[Json]:
    """Returns the objects that a console receives for events. JSON objects among the arguments are
    returned unchanged."""
    view = View()
    return [
        change
        for each in events
        for change in (view.take(each) if isinstance(each, Event) else [each])
    ]


def epoch(at: float, number: int = 3, **fields: Any) -> Event:
    return event(
        at,
        epoch=watch_pb2.EpochEvent(
            **{
                "epoch": number,
                "model": "demo",
                "n_stages": 2,
                "tp_size": 1,
                "n_slots": 1000,
                "block_size": 16,
                "max_batch_size": 32,
                "pipeline_depth": 2,
                "policy": "chunked",
                "order": "fcfs",
                **fields,
            }
        ),
    )


def request(at: float, number: int, turn: str, **fields: Any) -> Event:
    if "reason" in fields:
        reason = f"COMPLETION_REASON_{fields['reason'].upper()}"
        fields["reason"] = scheduler_pb2.CompletionReason.Value(reason)
    turn = f"REQUEST_TURN_{turn.upper()}"
    return event(at, request=watch_pb2.RequestEvent(number=number, turn=turn, **fields))


def arrival(at: float, number: int, n_prompt: int, limit: int, account: str = "") -> Event:
    return request(
        at,
        number,
        "waiting",
        request_id=f"cmpl-{number:04}",
        n_prompt_tokens=n_prompt,
        max_new_tokens=limit,
        account=account,
    )


def iteration(
    at: float,
    number: int,
    spans: Mapping[int, tuple[int, str, int]],
    *,
    compute_s: float = 0.1,
    ended: tuple[int, ...] = (),
) -> Event:
    """Returns the event of an iteration that was sent `at` seconds after the beginning. `spans` has
    a span (tokens, kind, position) of each request.

    Both stages compute for `compute_s` seconds, one after the other.
    """
    kinds = {"p": "PREFILL", "d": "DECODE", "r": "RECOMPUTATION"}
    ns = round(compute_s * NS)
    return event(
        at + 2 * compute_s,
        iteration=watch_pb2.IterationEvent(
            epoch=3,
            iteration=number,
            sent_unix_ns=round((T + at) * NS),
            round_trip_ns=2 * ns,
            numbers=spans.keys(),
            start_positions=[start for _, _, start in spans.values()],
            n_tokens=[n for n, _, _ in spans.values()],
            kinds=[f"SPAN_KIND_{kinds[kind]}" for _, kind, _ in spans.values()],
            n_new_tokens=[1] * len(spans),
            ended=ended,
            n_in_flight=2,
            n_waiting=0,
            n_running=len(spans),
            n_reserved_slots=400,
            n_allocated_slots=300,
            n_shared_slots=100,
            n_cached_slots=50,
            stages=[
                watch_pb2.StageTimes(start_ns=0, compute_ns=ns),
                watch_pb2.StageTimes(start_ns=ns, receive_ns=1, compute_ns=ns, send_ns=1),
            ],
        ),
    )


def pool(at: float, waiting: list[int], running: Mapping[int, int]) -> Event:
    """Returns the event of a pool. `running` has the number of generated tokens of each running
    request."""
    return event(
        at,
        pool=watch_pb2.PoolEvent(
            waiting=waiting,
            n_waiting=len(waiting),
            running=running.keys(),
            n_generated_tokens=running.values(),
        ),
    )


def mark(at: float, kind: str, text: str, *numbers: int) -> Event:
    kind = f"MARK_KIND_{kind.upper()}"
    return event(at, mark=watch_pb2.MarkEvent(kind=kind, epoch=3, text=text, numbers=numbers))


STORY = [
    epoch(0.0),
    arrival(0.0, 1, 7, 20, account="alice"),
    arrival(0.0, 2, 50, 3),
    request(0.0, 1, "admitted"),
    request(0.0, 2, "admitted"),
    pool(0.0, [], {1: 0, 2: 0}),
    iteration(0.0, 1, {1: (7, "p", 0), 2: (50, "p", 0)}),
    arrival(0.25, 3, 9, 5),
    pool(0.25, [3], {1: 1, 2: 1}),
    iteration(0.2, 2, {1: (1, "d", 7), 2: (1, "d", 50)}, ended=(1,)),
    request(0.4, 2, "ended", n_generated_tokens=2, reason="stop"),
    request(0.4, 3, "admitted", n_cached_tokens=4),
    pool(0.4, [], {1: 2, 3: 0}),
    iteration(0.4, 3, {1: (1, "d", 8), 3: (5, "p", 4)}),
    iteration(0.6, 4, {3: (3, "r", 7), 1: (1, "d", 9)}),
]
"""Events of 0.8 seconds."""


def write_recording(path: Path, events: Sequence[Event | Json] = STORY) -> Path:
    """Writes a recording."""
    lines = [json.dumps(each) for each in (dict(HEADER), *told(*events))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
