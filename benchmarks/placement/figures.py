"""The figures of one run of a fleet."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from benchmarks.serving.shares import jain_index
from simulator.outcome import Outcome, RequestTimes, percentile


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, in seconds of its virtual time."""

    begin_s: float
    end_s: float

    def has(self, time_s: float) -> bool:
        """Returns whether a time is in the window."""
        return self.begin_s <= time_s < self.end_s

    def n_output(self, request: RequestTimes) -> float:
        """Returns how many output tokens of a request came in the window, if all gaps between its
        tokens were equal."""
        first = float(self.has(request.first_token_s))
        length_s = request.end_s - request.first_token_s
        if request.n_output == 1 or length_s <= 0:
            return first * request.n_output
        inside_s = min(request.end_s, self.end_s) - max(request.first_token_s, self.begin_s)
        return first + max(0.0, inside_s) / length_s * (request.n_output - 1)

    def n_tokens(self, request: RequestTimes) -> float:
        """Returns how many tokens of a request were computed in the window. A prompt counts at the
        time of the first output token."""
        return self.n_output(request) + request.n_prompt * self.has(request.first_token_s)


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
    of their even shares (`benchmarks.serving.shares`)."""

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


def fairness(outcome: Outcome, window: Window) -> float:
    """Returns Jain's index over the clients in a window. A client demands the tokens of all its
    requests that have arrived before the end of the window and were not complete at its begin."""
    got: defaultdict[str | None, float] = defaultdict(float)
    demands: defaultdict[str | None, float] = defaultdict(float)
    before = Window(float("-inf"), window.begin_s)
    for request in outcome.requests:
        if request.arrival_s < window.end_s and request.end_s > window.begin_s:
            n_left = request.n_prompt + request.n_output - before.n_tokens(request)
            got[request.account] += window.n_tokens(request)
            demands[request.account] += n_left
    return jain_index([got[one] for one in demands], list(demands.values()))
