"""The figures of one run of a fleet."""

from dataclasses import dataclass
from typing import Self

from simulator.fairness import Window, fairness
from simulator.outcome import Outcome, percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run; times are in seconds."""

    ttft_p50_s: float
    ttft_p99_s: float
    """Time to the first token of the requests that arrived in the window."""
    tokens_per_s: float
    """Output tokens a second in the window."""
    hit_rate: float
    """Part of the tokens of all prompts that prefix caches had."""
    jain: float
    """Jain's index over the clients, of their tokens of prompts and outputs in the window as parts
    of their even shares (`simulator.fairness`)."""

    @classmethod
    def of(cls, outcome: Outcome, hit_rate: float, window: Window) -> Self:
        """Returns the figures of a run of which all requests have ended."""
        ttfts_s = [one.ttft_s for one in outcome.requests if window.has(one.arrival_s)]
        n_output = sum(map(window.n_output, outcome.requests))
        return cls(
            ttft_p50_s=percentile(ttfts_s, 50),
            ttft_p99_s=percentile(ttfts_s, 99),
            tokens_per_s=n_output / (window.end_s - window.begin_s),
            hit_rate=hit_rate,
            jain=fairness(outcome, window),
        )
