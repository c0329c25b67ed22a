"""The workload that settings are found for, and what counts as good on it."""

from dataclasses import dataclass

from services.tune.settings import TuneSettings
from simulator.engine import Arrival, arrivals_of
from simulator.outcome import LatencyLimits, Outcome
from simulator.workload import (
    Lengths,
    all_at_once,
    mixed_lengths,
    poisson_arrivals,
    read_trace,
)

MIN_KEPT = 0.99
"""Part of the requests that must keep limits at the rate that is looked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, when they come, and the goal."""

    lengths: tuple[Lengths, ...]
    rate: float | None
    """Requests a second; None where all come at once, or the rate is what is looked for."""
    limits: LatencyLimits
    seed: int

    @classmethod
    def of(cls, settings: TuneSettings, max_model_len: int) -> "Workload":
        """Returns the workload of the settings, without what the model cannot hold.

        Raises:
            ValueError: nothing is left, or there is no such trace.
        """
        if settings.trace is not None:
            trace = read_trace(settings.trace, settings.trace_format).fitting(max_model_len)
            lengths = trace.first(settings.requests).lengths
        else:
            lengths = tuple(
                each
                for each in mixed_lengths(
                    settings.requests,
                    seed=settings.seed,
                    prompts=settings.prompt_tokens,
                    outputs=settings.output_tokens,
                )
                if each.n_tokens <= max_model_len
            )
        if not lengths:
            name = "prompt_tokens" if settings.trace is None else "trace"
            raise ValueError(f"{name}: no request fits into a context of {max_model_len} tokens")
        limits = LatencyLimits(ttft_s=settings.ttft_p99_s, tpot_s=settings.tpot_p99_s)
        return cls(lengths, settings.rate, limits, settings.seed)

    @property
    def finds_rate(self) -> bool:
        """Whether the highest rate at which limits are kept is what is looked for."""
        return self.rate is None and self.limits.are_set

    @property
    def max_request_len(self) -> int:
        """Tokens of the longest request."""
        return max(each.n_tokens for each in self.lengths)

    @property
    def unit(self) -> str:
        """The unit of what is to be large."""
        return "requests/s in the limits" if self.limits.are_set else "tokens/s"

    def arrivals(self, rate: float | None = None) -> list[Arrival]:
        """Returns the requests with their times, at a rate if one is given."""
        rate = rate or self.rate
        n = len(self.lengths)
        times = all_at_once(n) if rate is None else poisson_arrivals(n, rate=rate, seed=self.seed)
        return arrivals_of(self.lengths, times)

    def value_of(self, outcome: Outcome) -> float:
        """Returns what is to be large."""
        if self.limits.are_set:
            return outcome.goodput(self.limits)
        return outcome.tokens_per_s

    def is_kept_by(self, outcome: Outcome) -> bool:
        """Returns whether enough requests kept the limits."""
        return outcome.kept(self.limits) >= MIN_KEPT
