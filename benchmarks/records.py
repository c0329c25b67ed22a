"""Records of a run: the times of each request, and the results computed from the times.

Times are seconds since the run's start. Latency counts from a request's *arrival*, the time at
which the request is due, so a client that falls behind makes a server look worse and not better.
*Normalised latency* is the paper's measure: end-to-end latency divided by the number of output
tokens. A request that failed has an `error`, and counts neither in latencies nor towards goodput.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of one request. `token_times_s` has the time of each output token; it is empty if
    these times are not known."""

    arrival_s: float
    start_s: float
    first_token_s: float | None
    end_s: float
    n_prompt: int
    n_output: int
    token_times_s: tuple[float, ...] = ()
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the request has ended without an error and with at least one output token."""
        return self.error is None and self.n_output > 0

    @property
    def latency_s(self) -> float:
        """Seconds from the request's arrival to its last token."""
        return self.end_s - self.arrival_s

    @property
    def normalised_latency_s(self) -> float:
        """Latency divided by the number of output tokens, in seconds per token."""
        return self.latency_s / self.n_output

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None if that time is not known."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each token to the next. If only the times of the first and the last token
        are known, every gap is their mean. Empty if there are fewer than two tokens."""
        if self.token_times_s:
            return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]
        if self.first_token_s is None or self.n_output < 2:
            return []
        n_gaps = self.n_output - 1
        return [(self.end_s - self.first_token_s) / n_gaps] * n_gaps


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile of many values, interpolated between the two nearest values."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """Returns the spread of `values`; None if there are none."""
        array = np.fromiter(values, dtype=np.float64)
        return cls(*np.percentile(array, (50, 99)).tolist()) if array.size else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a run. Rates are over the time from the first arrival to the last token."""

    n_requests: int
    n_failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    """Prompt and output tokens of complete requests per second."""
    offered_per_s: float | None
    """Requests that arrived per second; None if all arrived at once."""
    normalised_latency_s: Spread | None
    time_to_first_token_s: Spread | None
    gap_s: Spread | None
    """Spread of the seconds between consecutive tokens of a request."""
    goodput_per_s: float | None
    """Requests per second whose normalised latency was within the bound; None without a bound."""

    @classmethod
    def of(cls, requests: Sequence[RequestRecord], *, bound_s: float | None = None) -> Self:
        """Returns the summary of `requests`, of which there must be at least one. `bound_s` is a
        bound on normalised latency in seconds per token, for goodput."""
        done = [request for request in requests if request.is_complete]
        arrivals = [request.arrival_s for request in requests]
        duration_s = max(request.end_s for request in requests) - min(arrivals)
        window_s = max(arrivals) - min(arrivals)
        n_output = sum(request.n_output for request in done)
        n_kept = sum(bound_s is not None and r.normalised_latency_s <= bound_s for r in done)
        return cls(
            n_requests=len(requests),
            n_failed=len(requests) - len(done),
            duration_s=duration_s,
            requests_per_s=len(done) / duration_s,
            output_tokens_per_s=n_output / duration_s,
            tokens_per_s=(n_output + sum(request.n_prompt for request in done)) / duration_s,
            offered_per_s=(len(requests) - 1) / window_s if window_s else None,
            normalised_latency_s=Spread.of(request.normalised_latency_s for request in done),
            time_to_first_token_s=Spread.of(
                request.time_to_first_token_s
                for request in done
                if request.time_to_first_token_s is not None
            ),
            gap_s=Spread.of(itertools.chain.from_iterable(request.gaps_s for request in done)),
            goodput_per_s=None if bound_s is None else n_kept / duration_s,
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of one run; `meta` has the machine, the settings and the command."""

    meta: dict[str, Any]
    requests: tuple[RequestRecord, ...]

    def summary(self, *, bound_s: float | None = None) -> Summary:
        """Returns the summary of the run. `bound_s` is a bound on normalised latency in seconds per
        token, for goodput."""
        return Summary.of(self.requests, bound_s=bound_s)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns the run in `values`, which were parsed from JSON. Optional fields may be
        missing."""
        return cls(values["meta"], tuple(_request(each) for each in values["requests"]))


def write(path: Path, runs: Sequence[RunRecord]) -> None:
    """Writes runs into a JSON file: a list of runs, with one line per request."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(_text, runs)) + "\n]\n")


def read(path: Path) -> list[RunRecord]:
    """Returns the runs in a file that was written by `write`."""
    return [RunRecord.from_dict(values) for values in json.loads(path.read_text())]


def _text(run: RunRecord) -> str:
    meta, *requests = map(json.dumps, (run.meta, *map(_given, run.requests)))
    return f'{{"meta": {meta}, "requests": [\n' + ",\n".join(requests) + "\n]}"


def _given(request: RequestRecord) -> dict[str, Any]:
    values = {key: _rounded(value) for key, value in dataclasses.asdict(request).items()}
    return {key: value for key, value in values.items() if value not in (None, ())}


def _rounded(value: Any) -> Any:
    """Returns a time, or a tuple of times, rounded to the microsecond. All other values are
    returned unchanged. No clock here is more exact, and files become half as large."""
    match value:
        case float():
            return round(value, 6)
        case tuple():
            return tuple(round(each, 6) for each in value)
    return value


def _request(values: dict[str, Any]) -> RequestRecord:
    times = tuple(values.get("token_times_s", ()))
    return RequestRecord(**{"first_token_s": None, **values, "token_times_s": times})
