"""The figures by which policies are compared."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simulator.fairness import Window, fairness
from simulator.outcome import Outcome, percentile

MIN_ACCOUNTS = 2


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run. Times are in seconds."""

    n_requests: int
    tokens_per_s: float
    """Output tokens per second, from the first arrival to the last token."""
    ttft_p50_s: float
    ttft_p99_s: float
    """50th and 99th percentile of the seconds from the arrival of a request to its first token."""
    gap_p50_s: float
    gap_p99_s: float
    """50th and 99th percentile of the seconds between two successive tokens of a request."""
    jain: float | None
    """Jain's fairness index of the clients until the last arrival. The value of a client is the
    number of tokens that it got, divided by its even share. None if there are fewer than two
    clients, or if no token came before the last arrival."""
    n_preemptions: int | None
    select_us: float | None
    """Mean processor time of one selection of the policy, in microseconds. None if it was not
    measured."""

    @classmethod
    def of(
        cls, outcome: Outcome, *, n_preemptions: int | None, select_us: float | None
    ) -> "Figures":
        """Returns the figures of an outcome in which all requests have ended."""
        ttfts_s = [one.ttft_s for one in outcome.requests]
        begin_s = min(one.arrival_s for one in outcome.requests)
        window = Window(begin_s, max(one.arrival_s for one in outcome.requests))
        is_served = any(one.first_token_s < window.end_s for one in outcome.requests)
        accounts = {one.account for one in outcome.requests if one.account is not None}
        has_shares = is_served and len(accounts) >= MIN_ACCOUNTS
        return cls(
            n_requests=len(outcome.requests),
            tokens_per_s=outcome.tokens_per_s,
            ttft_p50_s=percentile(ttfts_s, 50),
            ttft_p99_s=percentile(ttfts_s, 99),
            gap_p50_s=_gap(outcome.gaps_s, 50),
            gap_p99_s=_gap(outcome.gaps_s, 99),
            jain=fairness(outcome, window) if has_shares else None,
            n_preemptions=n_preemptions,
            select_us=select_us,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one entrant on one trace."""

    trace: str
    entrant: str
    way: str
    """How the run was made. `virtual`: in virtual time. `sleeping`: on a system whose ranks sleep.
    `real`: on a system whose ranks compute. `replayed`: in virtual time, with costs that were
    fitted to the iterations of a real run. `recorded`: by the scheduler that made a recording."""
    figures: Figures | None
    """Figures of the run. None if the run was stopped."""
    stopped: str = ""
    """Why the run was stopped: the broken rule, with the policy and the batch, or the failure of
    the system. Empty if the run was complete."""

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        found = {"trace": self.trace, "policy": self.entrant, "way": self.way}
        if self.figures is None:
            return {**found, "stopped": self.stopped}
        return {**found, **asdict(self.figures)}


def _gap(gaps_s: Sequence[float], percent: float) -> float:
    return percentile(gaps_s, percent) if len(gaps_s) else 0.0
