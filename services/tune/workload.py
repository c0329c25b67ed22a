"""The workload for which settings are found, and the value that the tuner maximises."""

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
"""Fraction of the requests that must keep the latency limits."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a workload, their rate of arrival, and the latency limits."""

    lengths: tuple[Lengths, ...]
    rate: float | None
    """Arrival rate in requests per second. None if all requests arrive at once, or if the highest
    rate is searched."""
    limits: LatencyLimits
    seed: int

    @classmethod
    def of(cls, settings: TuneSettings, max_model_len: int) -> "Workload":
        """Returns the workload that the settings describe, without requests that exceed the model's
        context.

        Raises:
            ValueError: no request is left, or the trace cannot be read.
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
            name = "prompt_tokens, output_tokens" if settings.trace is None else "trace"
            raise ValueError(f"{name}: no request fits into a context of {max_model_len} tokens")
        limits = LatencyLimits(ttft_s=settings.ttft_p99_s, tpot_s=settings.tpot_p99_s)
        return cls(lengths, settings.rate, limits, settings.seed)

    @property
    def finds_rate(self) -> bool:
        """Whether the goal is the highest rate at which the latency limits are kept."""
        return self.rate is None and self.limits.are_set

    @property
    def max_request_len(self) -> int:
        """Number of tokens of the longest request, with prompt and output together."""
        return max(each.n_tokens for each in self.lengths)

    @property
    def unit(self) -> str:
        """The unit of the value to maximise, as text."""
        return "requests/s in the limits" if self.limits.are_set else "tokens/s"

    def arrivals(self, rate: float | None = None) -> list[Arrival]:
        """Returns the requests with their times of arrival. The rate of arrival is `rate` or, if it
        is None, the rate of the workload."""
        rate = rate or self.rate
        n = len(self.lengths)
        times = all_at_once(n) if rate is None else poisson_arrivals(n, rate=rate, seed=self.seed)
        return arrivals_of(self.lengths, times)

    def value_of(self, outcome: Outcome) -> float:
        """Returns the value of an outcome, which the tuner maximises: goodput in requests per
        second if there are latency limits, otherwise tokens per second."""
        if self.limits.are_set:
            return outcome.goodput(self.limits)
        return outcome.tokens_per_s

    def is_kept_by(self, outcome: Outcome) -> bool:
        """Returns whether at least `MIN_KEPT` of the requests kept the latency limits."""
        return outcome.kept(self.limits) >= MIN_KEPT
