"""A model with few parameters of the time that an iteration takes on each stage.

The time of a stage is a sum of terms, each with a coefficient that is not negative:

- reading the weights: a constant;
- matrix products: proportional to the number of tokens. The slope changes with the number, since
  kernels for few and for many tokens differ, and since more tokens choose more experts to read;
- sampling: proportional to the number of sampled tokens;
- attention of decodes: proportional to the number of K/V slots that they read;
- attention of prompts: proportional to the number of pairs of tokens.

`simulator.fit` finds the coefficients.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

KNOTS = (0, 1, 8, 32, 128, 512)
"""Numbers of tokens at which the slope of the time of matrix products may change."""

N_FEATURES = len(KNOTS) + 4

SLOPES = tuple(range(1, len(KNOTS) + 1))
"""Indices in the tuple of features of the numbers of tokens between knots, whose coefficients are
the slopes of matrix products."""


class IterationWork(NamedTuple):
    """The amounts of work of an iteration on which the iteration's time depends."""

    n_tokens: int
    n_sampled: int
    n_decode_slots: int
    """Number of K/V slots that spans of one token read."""
    n_prompt_pairs: int
    """Number of pairs of a token in a span of several tokens and a token to which it attends."""
    n_spans: int

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int, bool]]) -> "IterationWork":
        """Returns the work of a batch. A span is given by its start position, its number of tokens,
        and whether a token is sampled after the span."""
        n_tokens = n_sampled = n_decode_slots = n_prompt_pairs = n_spans = 0
        for start, n, is_sampled in spans:
            n_spans += 1
            n_tokens += n
            n_sampled += is_sampled
            if n == 1:
                n_decode_slots += start + 1
            else:
                n_prompt_pairs += n * start + n * (n + 1) // 2
        return cls(n_tokens, n_sampled, n_decode_slots, n_prompt_pairs, n_spans)


def features(work: IterationWork) -> tuple[float, ...]:
    """Returns the features of an iteration, which are multiplied with a stage's coefficients,
    [N_FEATURES]: the constant 1; the numbers of tokens in each interval between two knots and above
    the last knot; the number of sampled tokens; the number of K/V slots that decodes read; and the
    number of pairs of prompt tokens."""
    n = work.n_tokens
    ramps = [float(max(0, min(n, high) - low)) for low, high in pairwise(KNOTS)]
    return (
        1.0,
        *ramps,
        float(max(0, n - KNOTS[-1])),
        float(work.n_sampled),
        float(work.n_decode_slots),
        float(work.n_prompt_pairs),
    )


class Costs(Protocol):
    """A model of the times that a simulation needs, in seconds."""

    @property
    def n_stages(self) -> int:
        """Returns the number of stages."""

    @property
    def plan_s(self) -> float:
        """Returns the time from a selection until stage 0 may begin."""

    @property
    def hop_s(self) -> float:
        """Returns the time from the end of a stage until the next stage may begin."""

    @property
    def result_s(self) -> float:
        """Returns the time from the end of the last stage until the iteration's tokens are
        applied."""

    @property
    def request_s(self) -> float:
        """Returns the time that a request spends outside of iterations: from the client to the
        scheduler, and with its tokens back to the client."""

    def stage_s(self, stage_index: int, work: IterationWork) -> float:
        """Returns the seconds for which an iteration occupies a stage."""


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Costs that are linear in the features of an iteration, with coefficients for each stage."""

    coefficients: tuple[tuple[float, ...], ...]
    """Seconds for one unit of each feature on each stage, [n_stages, N_FEATURES]."""
    gap_s: float = 0.0
    """Seconds after an iteration for which a stage computes nothing and cannot begin another."""
    plan_s: float = 0.0
    hop_s: float = 0.0
    result_s: float = 0.0
    request_s: float = 0.0

    @property
    def n_stages(self) -> int:
        return len(self.coefficients)

    def stage_s(self, stage_index: int, work: IterationWork) -> float:
        """Returns the seconds for which an iteration occupies a stage."""
        return self.gap_s + dot(self.coefficients[stage_index], features(work))


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Returns the dot product of two vectors."""
    return sum(map(float.__mul__, left, right))
