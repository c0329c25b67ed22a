"""Preemption for a departure: the requests of a pipeline that is to end move to other pipelines.

A request moves if moving costs less than staying. The cost of moving is the number of tokens that
another pipeline would have to compute again; tokens in its prefix cache do not count. The cost of
staying is the number of tokens that are left to generate, because the pipeline must wait for them.
A request stays while no other pipeline has room for it, or while no other pipeline has the build
that made its tokens. Near the end all requests move. A request in flight moves when its batch has
returned, so that no iteration is lost.
"""

from collections.abc import Callable, Collection

from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool

TOKENS_PER_STEP = 16
"""Number of prefill tokens that take about as long as an iteration that generates one token."""


class ForDeparture:
    """Decides which requests of a draining pipeline move to other pipelines, and preempts them.
    Does nothing before `begin` is called."""

    def __init__(self, pool: RequestPool, *, preempt: Callable[[Request], None]) -> None:
        """`preempt` preempts a request that is in no batch."""
        self.has_begun = False
        """Whether the pipeline is to end."""
        self._is_last = False  # whether all requests must move, whatever that costs
        self._pool = pool
        self._preempt = preempt
        self._due: dict[Request, int] = {}  # to move as soon as in no batch; blocks needed there

    def begin(self, *, is_last: bool) -> None:
        """Notes that the pipeline is to end. With `is_last`, now or in an earlier call, all
        requests move."""
        self.has_begun, self._is_last = True, self._is_last or is_last
        self._pool.shared.placement.drain(self._pool, is_last=self._is_last)
        self._pool.shared.wake_all()

    @property
    def is_over(self) -> bool:
        """Whether the pipeline is to end, no request runs in it, and no waiting request needs
        it."""
        if not self.has_begun or self._pool.running:
            return False
        waiting = list(self._pool.order)
        return not self._pool.shared.placement.is_needed(self._pool, waiting)

    def prepare(self) -> None:
        """Chooses requests that move to other pipelines. Preempts the chosen requests that are in
        no batch. Holds back the chosen requests in flight: they join no further batch, and are
        preempted when their batches have returned."""
        placement = self._pool.shared.placement
        for request in self._pool.running:
            if request not in self._due and not request.is_cancelled and self._should_move(request):
                self._due[request] = placement.n_blocks_elsewhere(self._pool, request)
        for request in list(self._due):
            if request.n_in_flight:
                self._pool.hold_back(request)
            else:
                self._preempt(request)

    def settle(self, selected: Collection[Request]) -> None:
        """Does nothing: it does not matter here which requests are in a batch."""

    def is_due(self, request: Request) -> bool:
        """Returns whether a request was chosen to move, so that it must be preempted now. Called
        when no batch in flight contains the request any more."""
        return request in self._due

    def note_preempted(self, request: Request) -> None:
        """Notes that a request has moved, or was preempted for another reason."""
        self._due.pop(request, None)

    def note_end(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._due.pop(request, None)

    def note_freed(self, request: Request) -> None:
        """Does nothing: moves do not depend on the free memory of this pipeline."""

    def _should_move(self, request: Request) -> bool:
        if self._is_last:
            return True
        n_waiting = len(self._pool.order)
        n_tokens = self._pool.shared.placement.n_tokens_elsewhere(
            self._pool,
            request,
            n_more=len(self._due) + n_waiting,
            n_more_blocks=sum(self._due.values()),
        )
        n_left = request.max_sequence_len - request.n_tokens
        return n_tokens is not None and n_tokens <= TOKENS_PER_STEP * n_left
