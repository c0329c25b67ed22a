"""The results of one run of a fleet."""

from dataclasses import dataclass
from typing import Self

from simulator.fairness import Window, fairness
from simulator.outcome import Outcome, percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a run. Only what happens in a window of time counts, which begins after a
    warm-up."""

    ttft_p50_s: float
    ttft_p99_s: float
    """99th percentile of the time to the first token, in seconds, of the requests that arrived in
    the window."""
    tokens_per_s: float
    """Output tokens per second in the window."""
    hit_rate: float
    """Share of the prompt tokens of all requests that were found in prefix caches."""
    jain: float
    """Jain's index over the clients. The value of a client is the number of its prompt and output
    tokens in the window, divided by its even share (`simulator.fairness`)."""

    @classmethod
    def of(cls, outcome: Outcome, hit_rate: float, window: Window) -> Self:
        """Returns the results of a run in which all requests have ended."""
        ttfts_s = [one.ttft_s for one in outcome.requests if window.has(one.arrival_s)]
        n_output = sum(map(window.n_output, outcome.requests))
        return cls(
            ttft_p50_s=percentile(ttfts_s, 50),
            ttft_p99_s=percentile(ttfts_s, 99),
            tokens_per_s=n_output / (window.end_s - window.begin_s),
            hit_rate=hit_rate,
            jain=fairness(outcome, window),
        )
