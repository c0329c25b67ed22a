"""The outcome of a run, simulated or real: when each request came, began to be answered and ended.

Times are seconds since the run's start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """A request that has its whole answer."""

    arrival_s: float
    first_token_s: float
    end_s: float
    n_output: int
    account: str | None = None
    """Account of the request; None has none."""

    @property
    def ttft_s(self) -> float:
        """Time from the arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 if there is only one."""
        return (self.end_s - self.first_token_s) / max(1, self.n_output - 1)

    @property
    def normalised_s(self) -> float:
        """Latency for each token, the paper's measure."""
        return (self.end_s - self.arrival_s) / self.n_output


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """The longest latencies that a request may have, in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether anything is limited."""
        return self.ttft_s is not None or self.tpot_s is not None

    def keeps(self, request: RequestTimes) -> bool:
        """Returns whether a request kept them."""
        return (self.ttft_s is None or request.ttft_s <= self.ttft_s) and (
            self.tpot_s is None or request.tpot_s <= self.tpot_s
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run of at least one request."""

    requests: tuple[RequestTimes, ...]
    """The requests that have ended, by their ends."""
    n_output: int
    """Tokens of outputs, those of requests that have not ended included."""
    duration_s: float
    """From the first arrival to the last token."""
    n_iterations: int = 0
    mean_batch_size: float = 0.0
    """Requests in an iteration, on average."""
    max_reserved_slots: int = 0
    """K/V slots that requests had reserved at most."""
    busy: tuple[float, ...] = ()
    """Part of the time for which each stage had something to do."""
    gaps_s: Sequence[float] = ()
    """Times from each token of a request to its next, of all requests."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of outputs a second."""
        return self.n_output / self.duration_s

    @property
    def requests_per_s(self) -> float:
        """Requests a second."""
        return len(self.requests) / self.duration_s

    def goodput(self, limits: LatencyLimits) -> float:
        """Returns the requests a second that kept their limits."""
        return sum(map(limits.keeps, self.requests)) / self.duration_s

    def kept(self, limits: LatencyLimits) -> float:
        """Returns the part of the requests that kept their limits."""
        return sum(map(limits.keeps, self.requests)) / max(1, len(self.requests))

    @property
    def median_normalised_s(self) -> float:
        """Median of the normalised latencies."""
        return percentile([request.normalised_s for request in self.requests], 50)

    @property
    def p99_ttft_s(self) -> float:
        """The 99th percentile of the times to the first token."""
        return percentile([request.ttft_s for request in self.requests], 99)

    @property
    def p99_tpot_s(self) -> float:
        """The 99th percentile of the times for each further token."""
        return percentile([request.tpot_s for request in self.requests], 99)

    @property
    def p99_gap_s(self) -> float:
        """The 99th percentile of the times between tokens."""
        return percentile(self.gaps_s, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that is not exceeded by so many per cent of them; infinity where
    there are none."""
    if not values:
        return float("inf")
    return sorted(values)[max(0, ceil(len(values) * percent / 100) - 1)]
