"""Computes how long an iteration may take before the rank or pipeline that runs it counts as hung.

The limit follows the measured times of iterations: it is a floor plus a multiple of the expected
time, and at most a ceiling. The expected time is the sum of two estimates: one by the number of
tokens of the batch, and one by the number of pairs of tokens that attend to each other. Each
estimate is learned from iterations of about the same size. The estimates tend to be too high rather
than too low, for two reasons. An iteration of few tokens takes more time per token than an
iteration of many. And each of the two estimates is learned from the whole time of iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

MULTIPLE = 10.0
"""The time limit of an iteration is a floor plus its expected duration multiplied by this
factor."""

FIRST_S = 30.0
FIRST_TOKEN_S = 0.25
"""Expected duration of an iteration, in seconds, while none has been measured: `FIRST_S` plus
`FIRST_TOKEN_S` for each token."""

MAX_BITS = 64
"""Number of bits of the largest size that an iteration may have."""

DECAY = 0.9
"""Factor by which the longest time of a size class is multiplied before each new iteration of this
class is compared with it."""


@dataclass(frozen=True, slots=True)
class IterationSize:
    """The size of an iteration, which determines how long the iteration may take."""

    n_tokens: int
    n_attended: int
    """Number of pairs of tokens in which the first token attends to the second.

    For simplicity, each token of a span is counted as if it were the last token of the span.
    """

    @classmethod
    def of(cls, start_position: Sequence[int], n_tokens: Sequence[int]) -> "IterationSize":
        """Returns the size of an iteration. Span i begins at the position `start_position[i]` of
        its request and has `n_tokens[i]` tokens."""
        lengths = list(n_tokens)  # columns of a message are slow to go through
        n_all = sum(lengths)
        if n_all == len(lengths):  # decodes
            return cls(n_all, n_all + sum(start_position))
        n_attended = sum(map(mul, lengths, start_position)) + sum(map(mul, lengths, lengths))
        return cls(n_all, n_attended)


class IterationLimit:
    """Computes the time limit for each iteration of one rank or of one pipeline, from measured
    times.

    One thread may call `of` while another thread calls `learn`.
    """

    def __init__(self, *, floor_s: float, ceiling_s: float) -> None:
        """`floor_s` and `ceiling_s` are the lowest and the highest limit in seconds. If the ceiling
        is lower than the floor, the limit is the ceiling."""
        self.ceiling_s = ceiling_s
        self.floor_s = min(floor_s, ceiling_s)
        self._by_tokens = _LongestTimes()
        self._by_attended = _LongestTimes()

    def learn(self, work: IterationSize, elapsed_s: float) -> None:
        """Updates the expected time for iterations of the size `work` with the measured time
        `elapsed_s`."""
        self._by_tokens.learn(work.n_tokens, elapsed_s)
        self._by_attended.learn(work.n_attended, elapsed_s)

    def expected_s(self, work: IterationSize) -> float | None:
        """Returns the expected seconds of an iteration of the size `work`, or None before any
        iteration has been measured."""
        by_tokens = self._by_tokens.expected_s(work.n_tokens)
        by_attended = self._by_attended.expected_s(work.n_attended)
        if by_tokens is None or by_attended is None:
            return None
        return by_tokens + by_attended

    def of(self, work: IterationSize) -> float:
        """Returns the time limit of an iteration of the size `work`, in seconds."""
        expected_s = self.expected_s(work)
        if expected_s is None:
            multiple_s = FIRST_S + FIRST_TOKEN_S * work.n_tokens
        else:
            multiple_s = MULTIPLE * expected_s
        return min(self.floor_s + multiple_s, self.ceiling_s)


class _LongestTimes:
    """Keeps the longest recent time of iterations of each size class. The class is the number of
    bits of the size."""

    def __init__(self) -> None:
        self._longest_s: list[float | None] = [None] * MAX_BITS  # by the number of bits of the size

    def learn(self, size: int, elapsed_s: float) -> None:
        n_bits = size.bit_length()
        before_s = self._longest_s[n_bits]
        self._longest_s[n_bits] = max(elapsed_s, DECAY * (before_s or 0.0))

    def expected_s(self, size: int) -> float | None:
        """Returns the expected seconds for an iteration of `size`. Returns None before anything was
        measured.

        Sizes with an equal number of bits form one class. The estimate is the longest time in the
        classes up to the class of `size`, scaled in proportion to `size`. If a larger class was
        measured, the estimate is at most the longest time up to the next larger class that was
        measured.
        """
        n_bits = size.bit_length()
        longest_s = 0.0
        scaled_s: float | None = None
        for known_bits, time_s in enumerate(self._longest_s):
            if time_s is None:
                continue
            longest_s = max(longest_s, time_s)
            if known_bits > n_bits:
                return longest_s if scaled_s is None else min(scaled_s, longest_s)
            smallest = max(1, 1 << known_bits >> 1)  # the smallest size with this number of bits
            scaled_s = longest_s * size / smallest
        return scaled_s
