"""Reads a recording of a real scheduler, so that other policies can be run on the same requests.

A scheduler with the setting `record` writes a recording: its requests, the settings of its
pipelines, and the times of all iterations. From these, this module makes the arrivals of requests
and the setup for a run in virtual time. The setup has a model of the time that an iteration takes.
For the recorded iterations, the model predicts exactly the total time. The figures of the recorded
policy itself are computed from the recorded times.

In a run in virtual time, each output has its recorded length. A recording has no tokens. In their
place it has numbers that are equal if the tokens are equal, so a prefix cache finds equal prompts.
If a prompt repeats an earlier answer, the cache finds only the part before that answer, because a
simulation has no output tokens. A recording that was saved from the frontend's page has no prompts,
and is run without a prefix cache.

Requests for embeddings or scores are left out, because a simulated request always generates tokens.
The iterations that computed their prompts are still used to fit the model of times.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orcinus.v1 import watch_pb2

from services.arena.entrants import Entrant
from services.arena.figures import Figures
from services.arena.setup import Setup
from services.arena.traffic import Traffic
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.order.registry import ORDERS
from services.scheduler.core.policies.registry import POLICIES
from services.scheduler.core.request import TOKEN_ID
from services.scheduler.replay import NotARecording, objects_of
from services.scheduler.watching.core_facts import CoreFacts
from services.tune.calibration import costs_of_run, iterations_of
from simulator.engine import Arrival
from simulator.mooncake import FIRST_TOKEN
from simulator.outcome import Outcome, RequestTimes

DEFAULT_BATCH_TOKENS = 512
_NS = 1e9


@dataclass(slots=True)
class _Seen:
    """A request of the recording, with the times at which its tokens were generated."""

    number: int
    arrival_s: float
    n_prompt: int
    max_new_tokens: int
    account: str
    token_times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The contents of a scheduler's recording: its requests, its settings, and how fast they were
    served."""

    traffic: Traffic
    setup: Setup
    entrant: Entrant
    """The policy and the order of the recorded scheduler."""
    n_vectors: int
    """Number of requests for embeddings or scores, which are left out."""
    figures: Figures
    """The throughput and latencies of the recorded system."""


class _Reader:
    """Collects the events of a recording: its epochs, requests, iterations and decisions."""

    def __init__(self) -> None:
        self.requests: dict[int, _Seen] = {}
        self.records: list[watch_pb2.IterationEvent] = []
        self.n_preemptions = 0
        self.epochs: list[Mapping[str, Any]] = []
        self.cores: list[CoreFacts] = []
        self.prompts: dict[int, array[int]] = {}
        self.weights: dict[str, float] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds an event. Ignores events of types that are not collected."""
        match event["type"]:
            case "epoch":
                self.epochs.append(event)
            case "request":
                self._take_request(event)
            case "iteration":
                self.records.append(_iteration(event))
                self._take_tokens(self.records[-1])
            case "decision":
                self._take_decision(event)

    def _take_request(self, event: Mapping[str, Any]) -> None:
        self.n_preemptions += event["turn"] == "put_down"
        if event["turn"] == "waiting" and event["number"] not in self.requests:
            self.requests[event["number"]] = _Seen(
                event["number"],
                event["t"],
                event["n_prompt_tokens"],
                event.get("max_new_tokens", 0),  # none for a vector
                event.get("account", ""),
            )

    def _take_tokens(self, record: watch_pb2.IterationEvent) -> None:
        end_s = (record.sent_unix_ns + record.round_trip_ns) / _NS
        for number, n_new in zip(record.numbers, record.n_new_tokens, strict=True):
            if number in self.requests:
                self.requests[number].token_times_s += [end_s] * n_new

    def _take_decision(self, event: Mapping[str, Any]) -> None:
        if event.get("core"):
            self.cores.append(CoreFacts.model_validate_json(event["core"]))
        submission = event.get("submission")
        if submission is None:
            return
        if "account" in submission:
            self.weights[submission["account"]] = submission.get("weight", 1.0)
        tokens = [FIRST_TOKEN + number for number in submission.get("prompt_token_ids", ())]
        self.prompts[submission["number"]] = array(TOKEN_ID, tokens)


def read(path: Path) -> Recorded:
    """Reads a recording. Leaves out requests for embeddings or scores, and requests that got no
    token.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a recording, its policy or order is not known, or no request of
            it got a token.
    """
    reader = _Reader()
    try:
        with path.open("rb") as file:
            for _, event in objects_of(file):
                reader.take(event)
        asked = [one for one in reader.requests.values() if one.max_new_tokens]
        n_vectors = len(reader.requests) - len(asked)
        answered = [one for one in asked if one.token_times_s]
        if n_vectors and not asked:
            raise ValueError("all its requests are for vectors, which are left out")
        if not answered or not reader.epochs:
            raise ValueError("no request of it got a token")
        epoch = reader.epochs[0]
        entrant = Entrant(POLICIES.check(epoch["policy"]), ORDERS.check(epoch["order"]))
        setup = _setup(reader)
    except (NotARecording, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error!r}") from error
    return Recorded(
        Traffic(path.stem, _arrivals(answered, reader)),
        setup,
        entrant,
        n_vectors,
        _figures(answered, reader.n_preemptions),
    )


def _iteration(event: Mapping[str, Any]) -> watch_pb2.IterationEvent:
    return watch_pb2.IterationEvent(
        epoch=event["epoch"],
        pipeline=event.get("pipeline", 0),
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


def _arrivals(answered: Sequence[_Seen], reader: _Reader) -> tuple[Arrival, ...]:
    begin_s = min(one.arrival_s for one in answered)
    has_cache = bool(reader.cores) and reader.cores[0].has_prefix_cache
    accounts = {
        name: AccountUse(AccountLimits(weight=reader.weights.get(name, 1.0)), name=name)
        for name in {one.account for one in answered}
        if name
    }
    return tuple(
        Arrival(
            one.arrival_s - begin_s,
            one.n_prompt,
            len(one.token_times_s),
            max_new_tokens=max(one.max_new_tokens, len(one.token_times_s)),
            prompt_token_ids=reader.prompts.get(one.number) if has_cache else None,
            account=accounts.get(one.account),
        )
        for one in sorted(answered, key=lambda one: one.arrival_s)
    )


def _setup(reader: _Reader) -> Setup:
    """Returns the setup of a recording. The sizes come from the first epoch, the number of
    pipelines from all epochs, and the costs from the iterations. Whether there is a prefix cache
    comes from the first decision; without decisions there is none."""
    first = reader.epochs[0]
    return Setup(
        costs_of_run(iterations_of(reader.records)),
        n_slots=first["n_slots"],
        max_batch_size=first["max_batch_size"],
        max_batch_tokens=first["max_batch_tokens"] or DEFAULT_BATCH_TOKENS,
        block_size=first["block_size"],
        pipeline_depth=first["pipeline_depth"],
        n_pipelines=1 + max(one.get("pipeline", 0) for one in reader.epochs),
        has_prefix_cache=bool(reader.cores) and reader.cores[0].has_prefix_cache,
        is_optimistic=first["admission"] == "optimistic",
    )


def _figures(answered: Sequence[_Seen], n_preemptions: int) -> Figures:
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
