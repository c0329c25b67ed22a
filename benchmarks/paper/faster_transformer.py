"""FasterTransformer under request-level scheduling, as the paper measured it (sections 3 and 6).

When the engine has nothing to do, up to `max_batch_size` requests are taken from the queue, as by
Triton's dynamic batcher without a delay. A batch is one call of the engine:

- Its first iteration has all prompts as if they were as long as the shortest one. What is left of
  the longer ones comes token by token in the iterations after it.
- All its requests are computed until the last has as many tokens as it asked for; those that have
  ended before are computed with the others. Nothing is returned before.
- Keys and values of `max_sequence_len` tokens are allocated for each request.
- It goes through the stages in microbatches, each as often as the longest of the batch needs.

Takes the place of `Scheduler` in a simulation.
"""

from collections import deque
from collections.abc import Sequence

from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.scheduler import Update


class FasterTransformer:
    """The scheduler and the batches of one engine."""

    def __init__(
        self,
        *,
        n_slots: int,
        max_batch_size: int,
        microbatch_size: int,
        max_sequence_len: int = 2048,
    ) -> None:
        """Raises ValueError if a batch does not fit into `n_slots` slots of K/V memory."""
        if max_batch_size * max_sequence_len > n_slots:
            raise ValueError(
                f"{max_batch_size} requests of {max_sequence_len} slots do not fit into {n_slots}"
            )
        self._max_batch_size = max_batch_size
        self._microbatch_size = microbatch_size
        self._max_sequence_len = max_sequence_len
        self._queue: deque[Request] = deque()
        self._parts: deque[_Microbatch] = deque()  # of the batch that runs, not in flight
        self._in_flight: dict[int, _Microbatch] = {}
        self._updates: list[Update] = []
        self._n_iterations = 0
        self._n_riding = 0

    @property
    def n_reserved_slots(self) -> int:
        """K/V slots that are allocated for the batch that runs."""
        return self._n_riding * self._max_sequence_len

    def submit(self, request: Request) -> None:
        """Puts a request into the queue."""
        self._queue.append(request)

    def take_put_down(self) -> list[Request]:
        """Returns nothing: nobody gives way."""
        return []

    def select(self) -> Batch | None:
        """Returns the next iteration of the microbatch that has waited longest; None if all are in
        flight, or there is nothing to do."""
        if not self._parts and not self._in_flight:
            self._begin_batch()
        if not self._parts:
            return None
        part = self._parts.popleft()
        self._n_iterations += 1
        self._in_flight[self._n_iterations] = part
        return Batch(iteration=self._n_iterations, spans=part.next_spans(), released_rows=())

    def apply(self, iteration: int, token_ids: Sequence[int]) -> list[Update]:
        """Takes the tokens of an iteration; returns those of the whole batch once it has ended."""
        part = self._in_flight.pop(iteration)
        self._updates += part.apply(token_ids)
        if not part.is_over:
            self._parts.append(part)
        if self._parts or self._in_flight:
            return []
        updates, self._updates, self._n_riding = self._updates, [], 0
        return updates

    def _begin_batch(self) -> None:
        size = min(len(self._queue), self._max_batch_size)
        requests = [self._queue.popleft() for _ in range(size)]
        if not requests:
            return
        self._n_riding = size
        shortest = min(request.n_prompt_tokens for request in requests)
        n_iterations = max(request.max_sequence_len for request in requests) - shortest
        for first in range(0, size, self._microbatch_size):
            part = requests[first : first + self._microbatch_size]
            self._parts.append(_Microbatch(part, n_first=shortest, n_iterations=n_iterations))


class _Microbatch:
    """Requests that go through the pipeline together, all at the same position."""

    def __init__(self, requests: Sequence[Request], *, n_first: int, n_iterations: int) -> None:
        self._requests = requests
        self._n_first = n_first
        self._n_left = n_iterations
        self._position = 0
        self._sampled: list[Request] = []
        self._ended: set[Request] = set()

    @property
    def is_over(self) -> bool:
        return self._n_left == 0

    def next_spans(self) -> tuple[Span, ...]:
        n_tokens = 1 if self._position else self._n_first
        start, self._position = self._position, self._position + n_tokens
        self._n_left -= 1
        self._sampled = [request for request in self._requests if self._is_sampled(request)]
        wanted = set(self._sampled)
        return tuple(
            Span(
                request,
                start,
                n_tokens,
                token_ids=[],
                is_admission=not start,
                is_sampled=request in wanted,
                new_block_ids=[],
            )
            for request in self._requests
        )

    def apply(self, token_ids: Sequence[int]) -> list[Update]:
        updates = []
        for request, token_id in zip(self._sampled, token_ids, strict=True):
            reason: FinishReason | None = request.accept(token_id)
            if reason is not None:
                self._ended.add(request)
            updates.append(Update(request, token_id, reason, len(request.generated_token_ids)))
        return updates

    def _is_sampled(self, request: Request) -> bool:
        return request not in self._ended and self._position >= request.n_prompt_tokens
