"""Log-probabilities of consecutive tokens, stored compactly in arrays."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from orcinus.v1 import logprobs_pb2

LOGPROB_BYTES = 100
"""Largest number of bytes of memory that a log-probability takes. Most of these bytes are needed
only while the log-probability is written as text."""


MANY_LOGPROBS = 4096
"""Largest number of log-probabilities that the event loop itself writes as text, which takes some
milliseconds. A thread writes larger numbers."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens, and of the `n_top` most likely tokens at each of
    their positions. `len` is the number of tokens."""

    values: "array[float]"  # [n_tokens]
    ranks: "array[int]"  # [n_tokens], rank of each token by likelihood, from 1
    top_token_ids: "array[int]"  # [n_tokens * n_top], by position, most likely first
    top_values: "array[float]"  # [n_tokens * n_top]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parses a serialised message `Logprobs`.

        Raises:
            ValueError: the bytes are not such a message, or its lists have lengths that do not fit
            together.
        """
        message = logprobs_pb2.Logprobs.FromString(data)
        logprobs = cls(
            array("f", message.logprobs),
            array("I", message.ranks),
            array("I", message.top_token_ids),
            array("f", message.top_logprobs),
        )
        n_tokens, n_top = len(logprobs.values), logprobs.n_top
        lengths = len(logprobs.ranks), len(logprobs.top_token_ids), len(logprobs.top_values)
        if lengths != (n_tokens, n_tokens * n_top, n_tokens * n_top):
            raise ValueError(f"columns of {lengths} entries for {n_tokens} tokens")
        return logprobs

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Joins the log-probabilities of consecutive parts of a text, in the order of the parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            array("f", chain.from_iterable(part.values for part in parts)),
            array("I", chain.from_iterable(part.ranks for part in parts)),
            array("I", chain.from_iterable(part.top_token_ids for part in parts)),
            array("f", chain.from_iterable(part.top_values for part in parts)),
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def n_top(self) -> int:
        """Number of alternatives to each token."""
        return len(self.top_token_ids) // len(self.values) if self.values else 0

    @property
    def n_numbers(self) -> int:
        """Number of log-probabilities, including alternatives."""
        return len(self.values) + len(self.top_values)

    def part(self, start: int, stop: int) -> Self:
        """Returns the log-probabilities of the tokens from index `start` up to, but not including,
        `stop`."""
        if (start, stop) == (0, len(self.values)):
            return self
        n_top = self.n_top
        tops = slice(start * n_top, stop * n_top)
        return type(self)(
            self.values[start:stop],
            self.ranks[start:stop],
            self.top_token_ids[tops],
            self.top_values[tops],
        )

    def alternatives(self, place: int, n_top: int) -> list[tuple[int, float]]:
        """Returns the most likely tokens at a position, up to `n_top`, each with its
        log-probability. The most likely token comes first."""
        start = place * self.n_top
        tops = slice(start, start + min(n_top, self.n_top))
        return list(zip(self.top_token_ids[tops], self.top_values[tops], strict=True))
