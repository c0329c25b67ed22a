"""Computes figures (totals and rates) of the iterations of a scheduler's pipelines, for each second
of the scheduler's clock.

Events of iterations arrive a little late, so the figures of a second are computed `LAG_S` seconds
after its end. While no iterations run, no figures are made.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

MINUTE_S, RECENT_S = 60, 5
"""Lengths in seconds of the periods that figures cover: a minute for figures shown as numbers, and
a few seconds for figures drawn as lines."""

LAG_S = 0.5
"""Delay in seconds after which the event of an ended iteration is expected to have arrived."""

STEPS_PER_E = 100
"""Number of histogram steps for each factor of e in the duration. Steps are equal in the logarithm,
so a quantile is wrong by 0.5 % at most."""

Durations = Counter[int]
"""A histogram of durations: the number of durations in each step, by the index of the step."""


@dataclass(slots=True)
class Totals:
    """Totals of the iterations that ended within a period."""

    n_iterations: int = 0
    n_spans: int = 0
    n_tokens: int = 0
    allocated_slots: dict[int, int] = field(default_factory=dict)
    """The largest number of K/V slots of each pipeline that were allocated at one moment, keyed by
    the pipeline's number."""
    first_tokens: Durations = field(default_factory=Counter)
    """Histogram of the seconds from a request's arrival to its first token."""
    token_gaps: Durations = field(default_factory=Counter)
    """Histogram of the seconds between two successive tokens of a request."""

    def add(self, other: "Totals") -> None:
        """Adds the totals of another period to these totals."""
        self.n_iterations += other.n_iterations
        self.n_spans += other.n_spans
        self.n_tokens += other.n_tokens
        for pipeline, n_slots in other.allocated_slots.items():
            self.note_slots(pipeline, n_slots)
        self.first_tokens.update(other.first_tokens)
        self.token_gaps.update(other.token_gaps)

    def note_slots(self, pipeline: int, n_slots: int) -> None:
        """Records that `n_slots` K/V slots of a pipeline were allocated at one moment of the
        period."""
        self.allocated_slots[pipeline] = max(self.allocated_slots.get(pipeline, 0), n_slots)


def step_of(duration_s: float) -> int:
    """Returns the index of the histogram step that contains a duration. All steps have an equal
    width in the logarithm of the duration."""
    return round(math.log(max(duration_s, 1e-6)) * STEPS_PER_E)


def quantile_s(durations: Durations, part: float) -> float | None:
    """Returns the duration in seconds at the quantile `part`, a fraction from 0 to 1. Returns None
    if there are no durations."""
    left = math.floor(part * durations.total())
    for step in sorted(durations):
        left -= durations[step]
        if left < 0:
            return _rounded(math.exp(step / STEPS_PER_E))
    return None


class Figures:
    """Keeps the totals of each second of the last minute, and computes the figures from them."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Totals]] = deque()
        self._begin = 0
        self._end: int | None = None
        """End of the last second for which figures were computed. None before the first event."""
        self._are_empty = True

    def second(self, time_s: float) -> Totals:
        """Returns the totals to which an iteration that ended at `time_s` must be added. These are
        the totals of the second that contains `time_s`. If the figures of that second have already
        been yielded, they are the totals of the first second whose figures have not been yielded.
        """
        second = max(math.floor(time_s), self._end or 0)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Totals()))
        return self._seconds[-1][1]

    def advance(self, now_s: float) -> Iterator[dict[str, Any]]:
        """Yields the figures of each second that has ended `LAG_S` seconds before `now_s` or
        earlier, and has not been yielded yet. Yields nothing while all pipelines are idle."""
        if self._end is None:
            self._begin = self._end = math.floor(now_s)
        end = math.floor(now_s - LAG_S)
        while self._end < end:
            if not self._seconds and self._are_empty:
                self._end = end
                return
            self._end += 1
            while self._seconds and self._seconds[0][0] < self._end - MINUTE_S:
                self._seconds.popleft()
            yield {
                "t": float(self._end),
                "type": "figures",
                "minute": self._of_last(MINUTE_S),
                "recent": self._of_last(RECENT_S),
            }
            self._are_empty = not self._seconds

    def _of_last(self, n_seconds: int) -> dict[str, Any]:
        assert self._end is not None
        begin = max(self._begin, self._end - n_seconds)
        totals = _sum(each for at, each in self._seconds if begin <= at < self._end)
        span_s = max(1, self._end - begin)
        return {
            "tokens_per_s": _rounded(totals.n_tokens / span_s),
            "iterations_per_s": _rounded(totals.n_iterations / span_s),
            "batch_size": _rounded(totals.n_spans / max(1, totals.n_iterations)),
            "first_token_s": quantile_s(totals.first_tokens, 0.5),
            "first_token_p90_s": quantile_s(totals.first_tokens, 0.9),
            "token_gap_s": quantile_s(totals.token_gaps, 0.5),
            "token_gap_p90_s": quantile_s(totals.token_gaps, 0.9),
            "n_allocated_slots": sum(totals.allocated_slots.values()),
        }


def _sum(seconds: Iterable[Totals]) -> Totals:
    total = Totals()
    for second in seconds:
        total.add(second)
    return total


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
