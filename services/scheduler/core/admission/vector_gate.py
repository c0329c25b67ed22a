"""The gate for the prompts of requests for vectors (embeddings, scores): beside requests that
generate tokens, they have a limited share of each batch, so that a flood of texts does not slow
running streams.

Below, a request that generates tokens is called an answer, and any other request a vector. Vectors
have prompts and no decodes, so a flood of them fills each batch up to its limit on tokens, and each
token of a running stream then takes as long as a full batch. Prompts of answers do the same, but a
conversation sends one of them now and then, and its reader waits for it. A reader of vectors waits
for all of them.

So while answers run or wait, the prompts of vectors together get a limited number of tokens of a
batch. Their time is then at most a fixed fraction of the time of an iteration without prompts,
which is known as a number of prompt tokens (`overhead.py`). If no token is left for a vector, it
does not pass the gate, so an answer behind it may begin. Without answers, prompts of vectors fill
batches.
"""

from collections.abc import Iterable, Iterator

from services.scheduler.core.order.order import BatchLimits
from services.scheduler.core.request import Request


class VectorGate:
    """Limits the tokens that requests for vectors take in the batches of one pipeline. `limits`
    sets the gate for the next batch."""

    def __init__(self) -> None:
        self._n_free: int | None = None
        self._of_order: BatchLimits | None = None
        self._only_vectors_wait = False

    def limits(
        self, n_tokens: int | None, of_order: BatchLimits | None, *, only_vectors_wait: bool
    ) -> BatchLimits | None:
        """Sets the gate for the next batch, in which the prompts of requests for vectors may have
        `n_tokens` tokens; None if they are not limited. Returns the limits of this batch, which
        include the limits `of_order`, or None if no request is limited.

        `only_vectors_wait` says that all waiting requests are for vectors, so that none of them
        needs to be looked at once no token is left for them.
        """
        self._n_free = n_tokens
        self._of_order = of_order
        self._only_vectors_wait = only_vectors_wait
        return of_order if n_tokens is None else self

    def passing(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests that pass, in order. The caller must take tokens for each request
        (`take`) before asking for the next one."""
        return requests if self._n_free is None else self._passing(requests)

    def riders(self, candidates: Iterable[Request], max_running: int) -> Iterator[Request]:
        """Yields the candidates that the limits of the order let into the batch."""
        if self._of_order is None:
            return iter(candidates)
        return self._of_order.riders(candidates, max_running)

    def take(self, request: Request, n_tokens: int) -> int:
        """Takes at most `n_tokens` tokens for a request, and returns the number taken. A request
        whose prompt must run in one iteration is never limited, because no pipeline has such
        requests beside requests that generate tokens."""
        if request.wants_vector and self._n_free is not None:
            n_tokens = min(n_tokens, self._n_free)
        if self._of_order is not None:
            n_tokens = self._of_order.take(request, n_tokens)
        if request.wants_vector and self._n_free is not None:
            self._n_free -= n_tokens
        return n_tokens

    def _passing(self, requests: Iterator[Request]) -> Iterator[Request]:
        for request in requests:
            if self._n_free or not request.wants_vector:
                yield request
            elif self._only_vectors_wait and request.reservation is None:
                return
