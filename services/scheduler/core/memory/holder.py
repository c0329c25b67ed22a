"""The part of a request that the K/V memory depends on.

The memory knows requests by this interface only, so that a request may hold a `Reservation` without
a circular import.
"""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class BlockKeys:
    """The keys of a request's full blocks in the prefix cache, from the first block to the last one
    whose key was needed."""

    block_size: int
    secret: bytes
    """Secret with which the keys are made."""
    keys: list[bytes] = field(default_factory=list)


class Holder(Protocol):
    """The interface of a request that the K/V memory uses."""

    n_tokens: int
    """Number of tokens of the request that are known."""
    n_scheduled: int
    """Number of tokens of the request whose keys and values are stored, or about to be stored."""
    n_preemptions: int
    """Number of times that the request was preempted."""
    cache_scope: bytes | None
    """Requests with the same scope share blocks; a request whose scope is None shares none."""
    block_keys: BlockKeys | None

    @property
    def max_sequence_len(self) -> int:
        """Returns the largest number of tokens that the sequence of the request may reach."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Returns whether log-probabilities of the prompt's tokens are wanted. If so, the whole
        prompt must be computed."""

    def packed_span(self, start: int, n_tokens: int) -> bytes:
        """Returns `n_tokens` tokens of the request's sequence, from position `start` on, packed in
        4 bytes each."""
