"""The share of a batch that prompts of vectors have beside answers: a flood of texts leaves running
streams their pace.

Requests for vectors have prompts and no decodes, so a flood of them fills each batch up to its
limit on tokens, and each token of a running stream then takes as long as a full batch. Prompts of
answers do the same, but a conversation sends one of them now and then, and its reader waits for it.
A reader of vectors waits for all of them.

So while answers run in a pipeline, the prompts of vectors together get as many tokens in a batch as
take a fraction of the time of an iteration without prompts. That time is known in tokens of prompts
(`overhead.py`). A request for a vector that gets no token is passed over, so an answer behind it
may begin. Without answers, prompts of vectors fill batches.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from services.scheduler.core.order.order import BatchLimits
from services.scheduler.core.request import Request


class CountedPool(Protocol):
    """The part of the pool that decides whether requests for vectors are limited."""

    @property
    def n_waiting(self) -> int:
        """Number of waiting requests."""
        ...

    @property
    def n_waiting_vectors(self) -> int:
        """Number of waiting requests for vectors."""
        ...

    @property
    def n_running(self) -> int:
        """Number of running requests."""
        ...

    @property
    def n_running_vectors(self) -> int:
        """Number of running requests for vectors."""
        ...

    def batch_limits(self) -> BatchLimits | None:
        """Returns the limits of the order; None if it limits no request."""
        ...


class VectorShare:
    """Decides how many tokens the prompts of vectors have in a batch."""

    def __init__(self, fraction: float | None) -> None:
        """`fraction` is the time that prompts of vectors may add to an iteration beside answers,
        divided by the time of an iteration without prompts. With None they are not limited."""
        if fraction is not None and fraction <= 0:
            raise ValueError(f"vector_share must be more than 0, not {fraction}")
        self.fraction = fraction

    def n_tokens(self, overhead_tokens: int) -> int:
        """Returns the limit on tokens beside answers, which is at least 1. `overhead_tokens` is the
        number of prompt tokens that take as long as an iteration without prompts."""
        if self.fraction is None:
            return sys.maxsize
        return max(1, int(overhead_tokens * self.fraction))

    def limits(self, pool: CountedPool, overhead_tokens: int) -> BatchLimits | None:
        """Returns the limits for the next batch of a pipeline: those of the order, and the limit on
        vectors if answers run beside them. Returns None if no request is limited."""
        of_order = pool.batch_limits()
        n_vectors, n_waiting_vectors = pool.n_running_vectors, pool.n_waiting_vectors
        has_vectors = n_vectors or n_waiting_vectors
        if not has_vectors or n_vectors == pool.n_running or self.fraction is None:
            return of_order
        return VectorLimits(
            self.n_tokens(overhead_tokens),
            of_order,
            only_vectors_wait=pool.n_waiting == n_waiting_vectors,
        )


class VectorLimits:
    """Limits of one batch: those of the order, if there are any, and a number of tokens for all
    prompts of vectors together."""

    def __init__(
        self, n_tokens: int, of_order: BatchLimits | None, *, only_vectors_wait: bool
    ) -> None:
        """`only_vectors_wait` says that all waiting requests are for vectors, so that none of them
        needs to be looked at once no token is left for them."""
        self._n_free = n_tokens
        self._of_order = of_order
        self._only_vectors_wait = only_vectors_wait

    def riders(self, candidates: Iterable[Request], max_running: int) -> Iterator[Request]:
        """Yields the candidates that may be in the batch, in order. The caller must take tokens for
        each candidate before asking for the next one."""
        within = self._within(candidates)
        return within if self._of_order is None else self._of_order.riders(within, max_running)

    def take(self, request: Request, n_tokens: int) -> int:
        """Takes at most `n_tokens` tokens for a request, and returns the number taken."""
        if request.wants_vector:
            n_tokens = min(n_tokens, self._n_free)
        if self._of_order is not None:
            n_tokens = self._of_order.take(request, n_tokens)
        if request.wants_vector:
            self._n_free -= n_tokens
        return n_tokens

    def _within(self, candidates: Iterable[Request]) -> Iterator[Request]:
        for request in candidates:
            if self._n_free or not request.wants_vector:
                yield request
            elif self._only_vectors_wait and request.reservation is None:
                return
