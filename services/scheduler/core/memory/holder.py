"""The part of a request that the K/V memory depends on.

The memory knows requests by this interface alone, so a request may hold a `Reservation` without
that the two import each other.
"""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class BlockKeys:
    """The keys of a request's full blocks in the prefix cache, from the first block on, as many as
    were ever needed."""

    block_size: int
    keys: list[bytes] = field(default_factory=list)


class Holder(Protocol):
    """A request as far as its memory is concerned."""

    n_tokens: int
    """Number of its tokens that are known."""
    n_scheduled: int
    """Number of its tokens whose keys and values are stored, or are about to be."""
    n_preemptions: int
    """Times that it gave up its memory for other requests."""
    cache_scope: bytes | None
    """Requests with the same scope share blocks; a request whose scope is None shares none."""
    block_keys: BlockKeys | None

    @property
    def max_sequence_len(self) -> int:
        """Returns the number of tokens that its sequence may come to."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Returns whether its whole prompt must be computed, for the log-probabilities of it."""

    def packed_span(self, start: int, n_tokens: int) -> bytes:
        """Returns the `n_tokens` tokens of its sequence from `start` on, in 4 bytes each."""
