"""The outcome of a run, simulated or real: times of each request's arrival, first token and end.

Times are seconds since the start of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The times of a request that has its whole answer."""

    arrival_s: float
    first_token_s: float
    end_s: float
    n_output: int
    account: str | None = None
    """Name of the request's account; None if the request has no account."""
    n_prompt: int = 0
    """Number of tokens of the prompt; 0 if the number is not known."""

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds for each output token after the first; 0 if there is only one token."""
        return (self.end_s - self.first_token_s) / max(1, self.n_output - 1)

    @property
    def normalised_s(self) -> float:
        """Seconds from the arrival to the end, divided by the number of output tokens: the measure
        of the Orca paper."""
        return (self.end_s - self.arrival_s) / self.n_output


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits on a request's latencies, in seconds; None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether there is a limit."""
        return self.ttft_s is not None or self.tpot_s is not None

    def keeps(self, request: RequestTimes) -> bool:
        """Returns whether a request kept all limits."""
        return (self.ttft_s is None or request.ttft_s <= self.ttft_s) and (
            self.tpot_s is None or request.tpot_s <= self.tpot_s
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run of at least one request."""

    requests: tuple[RequestTimes, ...]
    """The requests that have ended, in the order of their ends."""
    n_output: int
    """Number of output tokens of all requests, including requests that have not ended."""
    duration_s: float
    """Seconds from the first arrival to the last token."""
    n_iterations: int = 0
    mean_batch_size: float = 0.0
    """Mean number of requests in an iteration."""
    max_reserved_slots: int = 0
    """Largest number of K/V slots that requests had reserved at one time."""
    busy: tuple[float, ...] = ()
    """Fraction of the duration for which each stage was busy."""
    gaps_s: Sequence[float] = ()
    """Seconds between two successive tokens of a request, for all pairs of all requests."""

    @property
    def tokens_per_s(self) -> float:
        """Number of output tokens per second."""
        return self.n_output / self.duration_s

    @property
    def requests_per_s(self) -> float:
        """Number of ended requests per second."""
        return len(self.requests) / self.duration_s

    def goodput(self, limits: LatencyLimits) -> float:
        """Returns the number of ended requests per second that kept the limits."""
        return sum(map(limits.keeps, self.requests)) / self.duration_s

    def kept(self, limits: LatencyLimits) -> float:
        """Returns the fraction of the ended requests that kept the limits; 0 if none has ended."""
        return sum(map(limits.keeps, self.requests)) / max(1, len(self.requests))

    @property
    def median_normalised_s(self) -> float:
        """Median of the requests' normalised latencies (`RequestTimes.normalised_s`)."""
        return percentile([request.normalised_s for request in self.requests], 50)

    @property
    def p99_ttft_s(self) -> float:
        """The 99th percentile of the requests' seconds to the first token."""
        return percentile([request.ttft_s for request in self.requests], 99)

    @property
    def p99_tpot_s(self) -> float:
        """The 99th percentile of the requests' mean seconds for each token after the first."""
        return percentile([request.tpot_s for request in self.requests], 99)

    @property
    def p99_gap_s(self) -> float:
        """The 99th percentile of the seconds between two successive tokens of a request."""
        return percentile(self.gaps_s, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest of the values that at least `percent` per cent of the values do not
    exceed; infinity if there are no values."""
    if not values:
        return float("inf")
    return sorted(values)[max(0, ceil(len(values) * percent / 100) - 1)]
