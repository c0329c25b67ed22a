"""A recording of a schedule, for the question what another policy would have done.

A recording (the scheduler's setting `record`) has the requests, the settings of the scheduling
core, and the times of all iterations. From these come the arrivals, a setup, and a model of costs
that is fitted to the iterations, as the tuner fits one. What the recorded policy really did is
measured in the recording itself.

Outputs have their recorded lengths. Prompts have numbers in the place of tokens, which is enough
for a prefix cache to find equal beginnings. A prompt that repeats an answer shares the answer only
up to its first token here, since a simulation has no texts.
"""

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orcinus.v1 import watch_pb2

from services.arena.entrants import Entrant
from services.arena.figures import Figures
from services.arena.setup import Setup
from services.arena.traffic import Traffic
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.request import TOKEN_ID
from services.scheduler.replay import NotARecording, objects_of
from services.scheduler.watching.core_facts import CoreFacts
from services.tune.calibration import calibrate, iterations_of
from simulator.engine import Arrival
from simulator.mooncake import FIRST_TOKEN
from simulator.outcome import Outcome, RequestTimes

_NS = 1e9


@dataclass(slots=True)
class _Seen:
    """A request of the recording."""

    arrival_s: float
    n_prompt: int
    max_new_tokens: int
    account: str
    n_output: int = 0
    token_times_s: list[float] = field(default_factory=list)
    prompt: "array[int] | None" = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording says."""

    traffic: Traffic
    setup: Setup
    entrant: Entrant
    """The policy and the order of the recording."""
    figures: Figures
    """What they really reached."""


def read(path: Path) -> Recorded:
    """Reads a recording. Requests without a token are left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no recording of a scheduler, or no request of it got a token.
    """
    seen: dict[int, _Seen] = {}
    facts: list[CoreFacts] = []
    records: list[watch_pb2.IterationEvent] = []
    weights: dict[str, float] = {}
    n_preemptions = 0
    try:
        with path.open("rb") as file:
            for _, event in objects_of(file):
                match event["type"]:
                    case "request":
                        n_preemptions += event["turn"] == "put_down"
                        _take_request(seen, event)
                    case "iteration":
                        records.append(_iteration(event))
                        _take_tokens(seen, records[-1])
                    case "decision":
                        _take_decision(seen, facts, weights, event)
    except (NotARecording, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no recording: {error}") from error
    if not facts:
        raise ValueError(f"{path} has no decisions; a scheduler records them itself (`record`)")
    answered = [one for one in seen.values() if one.token_times_s]
    if not answered:
        raise ValueError(f"{path}: no request got a token")
    first = facts[0]
    return Recorded(
        Traffic(path.stem, _arrivals(answered, weights, has_prompts=first.has_prefix_cache)),
        _setup(first, facts, records),
        Entrant(first.policy, first.order),
        _figures(answered, n_preemptions),
    )


def _take_request(seen: dict[int, _Seen], event: Mapping[str, Any]) -> None:
    number = event["number"]
    if event["turn"] == "waiting" and number not in seen:
        seen[number] = _Seen(
            event["t"],
            event["n_prompt_tokens"],
            event["max_new_tokens"],
            event.get("account", ""),
        )


def _take_decision(
    seen: dict[int, _Seen],
    facts: list[CoreFacts],
    weights: dict[str, float],
    event: Mapping[str, Any],
) -> None:
    if event.get("core"):
        facts.append(CoreFacts.model_validate_json(event["core"]))
    submission = event.get("submission")
    if submission is None:
        return
    request = seen.get(submission["number"])
    if "account" in submission:
        weights[submission["account"]] = submission.get("weight", 1.0)
    if request is not None:
        numbers = submission.get("prompt_token_ids", [])
        request.prompt = array(TOKEN_ID, [FIRST_TOKEN + number for number in numbers])


def _iteration(event: Mapping[str, Any]) -> watch_pb2.IterationEvent:
    return watch_pb2.IterationEvent(
        epoch=event["epoch"],
        pipeline=event["pipeline"],
        iteration=event["iteration"],
        sent_unix_ns=round(event["sent"] * _NS),
        round_trip_ns=round(event["round_trip_s"] * _NS),
        numbers=event["numbers"],
        start_positions=event["start_positions"],
        n_tokens=event["n_tokens"],
        n_new_tokens=event["n_new_tokens"],
        stages=[
            watch_pb2.StageTimes(
                start_ns=round(start * _NS),
                receive_ns=round(receive * _NS),
                compute_ns=round(compute * _NS),
                send_ns=round(send * _NS),
            )
            for start, receive, compute, send in event["stages"]
        ],
    )


def _take_tokens(seen: dict[int, _Seen], record: watch_pb2.IterationEvent) -> None:
    end_s = (record.sent_unix_ns + record.round_trip_ns) / _NS
    for number, n_new in zip(record.numbers, record.n_new_tokens, strict=True):
        if number in seen:
            seen[number].token_times_s += [end_s] * n_new


def _arrivals(
    answered: list[_Seen], weights: Mapping[str, float], *, has_prompts: bool
) -> tuple[Arrival, ...]:
    begin_s = min(one.arrival_s for one in answered)
    accounts = {
        name: AccountUse(AccountLimits(weight=weights.get(name, 1.0)), name=name)
        for name in {one.account for one in answered}
        if name
    }
    return tuple(
        Arrival(
            one.arrival_s - begin_s,
            one.n_prompt,
            len(one.token_times_s),
            max_new_tokens=max(one.max_new_tokens, len(one.token_times_s)),
            prompt_token_ids=one.prompt if has_prompts and one.prompt else None,
            account=accounts.get(one.account),
        )
        for one in sorted(answered, key=lambda one: one.arrival_s)
    )


def _setup(
    first: CoreFacts, facts: list[CoreFacts], records: list[watch_pb2.IterationEvent]
) -> Setup:
    costs = calibrate(iterations_of([record for record in records if record.stages])).costs
    return Setup(
        costs,
        n_slots=first.n_blocks * first.block_size,
        max_batch_size=first.max_batch_size,
        max_batch_tokens=first.max_batch_tokens or 512,
        block_size=first.block_size,
        pipeline_depth=first.pipeline_depth,
        n_pipelines=1 + max(one.pipeline for one in facts),
        has_prefix_cache=first.has_prefix_cache,
        is_optimistic=first.is_optimistic,
    )


def _figures(answered: list[_Seen], n_preemptions: int) -> Figures:
    begin_s = min(one.arrival_s for one in answered)
    end_s = max(one.token_times_s[-1] for one in answered)
    requests = tuple(
        RequestTimes(
            arrival_s=one.arrival_s - begin_s,
            first_token_s=one.token_times_s[0] - begin_s,
            end_s=one.token_times_s[-1] - begin_s,
            n_output=len(one.token_times_s),
            account=one.account or None,
            n_prompt=one.n_prompt,
        )
        for one in answered
    )
    gaps_s = [
        after - before
        for one in answered
        for before, after in zip(one.token_times_s, one.token_times_s[1:], strict=False)
    ]
    outcome = Outcome(
        requests=requests,
        n_output=sum(one.n_output for one in requests),
        duration_s=max(end_s - begin_s, 1e-12),
        gaps_s=gaps_s,
    )
    return Figures.of(outcome, n_preemptions=n_preemptions, select_us=None)
