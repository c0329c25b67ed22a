"""The time that an iteration takes on each stage, as a model of few parameters.

What takes time in an iteration: reading the weights (a constant), matrix products (by tokens, with
other slopes for few than for many, since the kernels for them differ and experts are read as tokens
choose them), sampling (by sampled tokens), and attention: of decodes by the K/V slots that they
read, of prompts by the pairs of tokens. A stage's time is a sum of these, each with a coefficient
that is not negative; `simulator.fit` finds them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

KNOTS = (0, 1, 8, 32, 128, 512)
"""Numbers of tokens at which the slope of the products' time may change."""

N_FEATURES = len(KNOTS) + 4

SLOPES = tuple(range(1, len(KNOTS) + 1))
"""Places of the slopes between knots among the features."""


class IterationWork(NamedTuple):
    """The size of an iteration, in what its time depends on."""

    n_tokens: int
    n_sampled: int
    n_decode_slots: int
    """K/V slots that spans of one token read."""
    n_prompt_pairs: int
    """Pairs of a token of a longer span and one that it attends to."""
    n_spans: int

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int, bool]]) -> "IterationWork":
        """Returns the size of a batch of spans: start position, tokens, whether one is sampled."""
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
    """Returns what a stage's coefficients are multiplied by, [N_FEATURES]: a constant, the tokens
    between each knot and the next, sampled tokens, slots and pairs."""
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
    """The time that everything takes, in seconds."""

    @property
    def n_stages(self) -> int:
        """Returns the number of stages."""

    @property
    def plan_s(self) -> float:
        """Returns the time from a selection until stage 0 may begin."""

    @property
    def hop_s(self) -> float:
        """Returns the time from the end of a stage until the next one may begin."""

    @property
    def result_s(self) -> float:
        """Returns the time from the end of the last stage until its tokens are applied."""

    @property
    def request_s(self) -> float:
        """Returns the time that a request takes on its way to the scheduler, and its tokens on
        theirs back to the client."""

    def stage_s(self, stage_index: int, work: IterationWork) -> float:
        """Returns the time for which an iteration occupies a stage."""


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Costs that are linear in the features of an iteration, with coefficients for each stage."""

    coefficients: tuple[tuple[float, ...], ...]
    """Seconds for one of each feature, [n_stages, N_FEATURES]."""
    gap_s: float = 0.0
    """Time between two iterations for which a stage is not free, beside what it computes."""
    plan_s: float = 0.0
    hop_s: float = 0.0
    result_s: float = 0.0
    request_s: float = 0.0

    @property
    def n_stages(self) -> int:
        return len(self.coefficients)

    def stage_s(self, stage_index: int, work: IterationWork) -> float:
        """Returns the time for which an iteration occupies a stage."""
        return self.gap_s + dot(self.coefficients[stage_index], features(work))


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Returns the sum of products."""
    return sum(map(float.__mul__, left, right))
