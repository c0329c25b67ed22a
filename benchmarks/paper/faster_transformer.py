"""FasterTransformer under request-level scheduling, as the paper measured it (sections 3 and 6),
and improved variants.

When the engine is idle, up to `max_batch_size` requests are taken from the queue, as in Triton's
dynamic batcher. A batch is one call of the engine:

- The first iteration computes, for each prompt, as many tokens as the shortest prompt has. The
  other tokens of longer prompts are computed one by one in the following iterations.
- All requests of the batch are computed until the last request has all its tokens, also requests
  that have ended before. No token is returned before the end of the batch.
- K/V memory for `max_sequence_len` tokens is allocated for each request.
- The batch passes through the stages in microbatches, all for as many iterations as the longest
  request needs.

`Kinder` has options that improve each of these points. The class `FasterTransformer` replaces
`Scheduler` in a simulation.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.request import FinishReason, Request
from simulator.virtual_clock import VirtualClock


class Prompts(Enum):
    """Choices for the number of prompt tokens of each request in the first iteration of a batch."""

    SHORTEST = auto()
    """As many tokens as the shortest prompt has. Later iterations compute the rest one by one."""
    PADDED = auto()
    """As many tokens as the longest prompt has. Shorter prompts are padded, and later iterations
    read the padding."""
    OWN = auto()
    """All tokens of the request's own prompt, as with selective batching."""


@dataclass(frozen=True, slots=True)
class Kinder:
    """Improvements of FasterTransformer that keep request-level scheduling."""

    prompts: Prompts = Prompts.SHORTEST
    is_continuous: bool = False
    """Whether each token is returned after its iteration, instead of after the whole batch."""
    leaves: bool = False
    """Whether requests that have ended are no longer computed. No new request takes their place."""
    allocates_own: bool = False
    """Whether a request allocates K/V memory for its own tokens, instead of for
    `max_sequence_len`."""
    n_batches: int = 1
    """Number of batches that run at the same time. With one batch for each stage, the pipeline is
    full without microbatches."""
    max_delay_s: float = 0.0
    """Largest number of seconds for which an idle engine waits for more requests before it begins a
    batch, counted from the arrival of the oldest request: Triton's `max_queue_delay`."""


class FasterTransformer:
    """The scheduler of one engine: its queue and its running batches."""

    def __init__(
        self,
        *,
        n_slots: int,
        max_batch_size: int,
        microbatch_size: int,
        max_sequence_len: int = 2048,
        kinder: Kinder | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        """Makes a scheduler. `clock` is the simulation's clock, which `max_delay_s` needs.

        Raises:
            ValueError: the batches do not fit into `n_slots` slots of K/V memory, or there is a
                delay and no clock.
        """
        self._kinder = Kinder() if kinder is None else kinder
        n_requests = max_batch_size * self._kinder.n_batches
        if not self._kinder.allocates_own and n_requests * max_sequence_len > n_slots:
            raise ValueError(
                f"{n_requests} requests of {max_sequence_len} slots do not fit into {n_slots}"
            )
        if self._kinder.max_delay_s and clock is None:
            raise ValueError("max_delay_s needs a clock")
        self._clock = clock
        self._n_slots = n_slots
        self._max_batch_size = max_batch_size
        self._microbatch_size = microbatch_size
        self._max_sequence_len = max_sequence_len
        self._queue: deque[Request] = deque()
        self._due_s: dict[Request, float] = {}  # time until which a request waits for others
        self._running: list[_RunningBatch] = []
        self._ready: deque[_Microbatch] = deque()
        self._in_flight: dict[int, _Microbatch] = {}
        self._n_iterations = 0

    @property
    def n_reserved_slots(self) -> int:
        """Number of K/V slots that are allocated for the running batches."""
        return sum(batch.n_slots for batch in self._running)

    def submit(self, request: Request) -> None:
        """Adds a request to the queue."""
        self._queue.append(request)
        if self._clock is not None and self._kinder.max_delay_s:
            self._due_s[request] = self._clock.now_s + self._kinder.max_delay_s
            self._clock.wake_at(self._due_s[request])

    def take_preempted(self) -> list[Request]:
        """Returns an empty list, since no request is preempted."""
        return []

    def select(self) -> Batch | None:
        """Returns the next iteration of the microbatch that has waited longest. Returns None if all
        microbatches are in flight, or if there is no request to begin."""
        if not self._ready and len(self._running) < self._kinder.n_batches:
            self._begin_batch()
        if not self._ready:
            return None
        part = self._ready.popleft()
        self._n_iterations += 1
        self._in_flight[self._n_iterations] = part
        return Batch(iteration=self._n_iterations, spans=part.next_spans(), released_rows=())

    def apply(self, iteration: int, token_ids: Sequence[int]) -> list[Update]:
        """Adds the sampled tokens of an iteration to their requests. Returns the updates of this
        iteration if delivery is continuous. Otherwise returns the updates of the whole batch when
        the batch has ended, and an empty list before."""
        part = self._in_flight.pop(iteration)
        batch = part.batch
        updates = part.apply(token_ids)
        if part.is_over:
            batch.n_left -= 1
        else:
            self._ready.append(part)
        if not self._kinder.is_continuous:
            batch.updates += updates
            updates = [] if batch.n_left else batch.updates
        if not batch.n_left:
            self._running.remove(batch)
        return updates

    def _begin_batch(self) -> None:
        requests = self._next_requests()
        if not requests:
            return
        for request in requests:
            self._queue.popleft()
            self._due_s.pop(request, None)
        batch = _RunningBatch(n_slots=sum(map(self._n_allocated, requests)))
        first = [request.n_prompt_tokens for request in requests]
        match self._kinder.prompts:
            case Prompts.SHORTEST:
                first = [min(first)] * len(first)
            case Prompts.PADDED:
                first = [max(first)] * len(first)
        parts = []
        for start in range(0, len(requests), self._microbatch_size):
            part = slice(start, start + self._microbatch_size)
            parts.append(_Microbatch(batch, requests[part], first[part], self._kinder.leaves))
        if not self._kinder.leaves:
            n_iterations = max(part.n_left for part in parts)
            for microbatch in parts:
                microbatch.n_left = n_iterations
        batch.n_left = len(parts)
        self._ready.extend(parts)
        self._running.append(batch)

    def _next_requests(self) -> list[Request]:
        """Returns the requests of the next batch. Returns an empty list if there are none, or while
        the batch waits for more requests."""
        result: list[Request] = []
        n_free = self._n_slots - self.n_reserved_slots
        for request in self._queue:
            n_free -= self._n_allocated(request)
            if n_free < 0:
                return result
            result.append(request)
            if len(result) == self._max_batch_size:
                return result
        return [] if result and self._may_wait(result[0]) else result

    def _may_wait(self, request: Request) -> bool:
        """Returns whether the batch that begins with `request` may still wait for more requests."""
        return self._clock is not None and self._clock.now_s < self._due_s.get(request, 0.0)

    def _n_allocated(self, request: Request) -> int:
        return request.max_sequence_len if self._kinder.allocates_own else self._max_sequence_len


@dataclass(slots=True, eq=False)
class _RunningBatch:
    """A running batch of the engine: the memory and the updates that its microbatches share."""

    n_slots: int
    n_left: int = 0
    """Number of microbatches that have not ended."""
    updates: list[Update] = field(default_factory=list)


class _Microbatch:
    """Requests of one batch that go through the pipeline together."""

    def __init__(
        self,
        batch: _RunningBatch,
        requests: Sequence[Request],
        n_first: Sequence[int],
        leaves: bool,
    ) -> None:
        """`n_first` has, for each request, the number of its tokens in the first iteration. With
        `leaves`, requests that have ended are no longer computed."""
        self.batch = batch
        self.n_left = max(map(_n_iterations, requests, n_first))
        """Number of remaining iterations."""
        self._requests = dict(zip(requests, n_first, strict=True))
        self._leaves = leaves
        self._n_run = 0
        self._sampled: list[Request] = []
        self._ended: set[Request] = set()

    @property
    def is_over(self) -> bool:
        return self.n_left == 0

    def next_spans(self) -> tuple[Span, ...]:
        self._n_run += 1
        self.n_left -= 1
        self._sampled = []
        spans = []
        for request, n_first in self._requests.items():
            if self._leaves and request in self._ended:
                continue
            start, n_tokens = (n_first + self._n_run - 2, 1) if self._n_run > 1 else (0, n_first)
            is_sampled = request not in self._ended and start + n_tokens >= request.n_prompt_tokens
            if is_sampled:
                self._sampled.append(request)
            spans.append(
                Span(
                    request,
                    start,
                    n_tokens,
                    token_ids=[],
                    is_admission=self._n_run == 1,
                    is_sampled=is_sampled,
                    new_block_ids=[],
                )
            )
        return tuple(spans)

    def apply(self, token_ids: Sequence[int]) -> list[Update]:
        updates = []
        for request, token_id in zip(self._sampled, token_ids, strict=True):
            reason: FinishReason | None = request.accept(token_id)
            if reason is not None:
                self._ended.add(request)
            updates.append(Update(request, token_id, reason, len(request.generated_token_ids)))
        if self._leaves and len(self._ended) == len(self._requests):
            self.n_left = 0
        return updates


def _n_iterations(request: Request, n_first: int) -> int:
    """Returns the number of iterations until a request has all its tokens, if the first iteration
    computes `n_first` tokens of its prompt."""
    return request.max_new_tokens + max(0, request.n_prompt_tokens - n_first)
