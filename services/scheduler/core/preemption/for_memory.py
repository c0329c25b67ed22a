"""Preemption for memory, where admission is optimistic: the last request in the order loses its
blocks.

Most requests end long before `max_tokens`. So a request reserves memory for its present tokens and
for less than the fraction of `max_tokens` that other requests have used lately. The request gets
more memory when it needs more. If no block is free then, the running request that comes last is
preempted. The preempted request gives up its memory and waits at its place, to be computed again
with all its tokens. A request in flight is preempted when its batch has returned; the request that
needs the memory waits until then.

No request waits for ever. The first request is never preempted for another, and has all memory when
all others have been preempted. So the first request runs to its end, and then another request is
the first. Work is not repeated for ever either. When the reservation of a request has to grow and
cannot, the request waits for twice as many blocks as the last time. So this happens to a request at
most log2(its blocks) + 2 times. A preempted request reserves twice as much at each return, and its
whole life after five preemptions. After that it can be preempted only for a request that runs
beside it and comes before it, and only as often as that request cannot grow.

An observer sees requests served in their order: no request is admitted while an admitted one waits
for memory, and preempted requests come before the requests behind them that have not run.
"""

from collections.abc import Callable, Collection, Iterable

from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.request_pool import RequestPool


class ForMemory:
    """Decides which admitted requests wait for memory, and which requests give up their memory."""

    def __init__(
        self,
        pool: RequestPool,
        kv_manager: KVManager,
        *,
        can_run: Callable[[Request], bool],
        preempt: Callable[[Request], None],
    ) -> None:
        """`can_run` says whether a request could join the next batch. `preempt` preempts a request
        that is in no batch."""
        self._pool = pool
        self._kv_manager = kv_manager
        self._n_drafts = kv_manager.groups.max_drafts
        self._can_run = can_run
        self._preempt = preempt
        self._held: list[Request] = []  # requests that wait for memory, by rank
        self._wanted: dict[Request, int] = {}  # tokens for which each request waits for memory
        self._victim: Request | None = None  # to be preempted as soon as it is in no batch
        self._leaving: set[Request] = set()  # ended requests whose memory is not free yet

    def prepare(self) -> None:
        """Provides memory for the next tokens of the requests that may be selected. Requests for
        which memory is missing are held back."""
        before = self._held if self._victim is None else [*self._held, self._victim]
        self._victim = None  # memory may be free now, or another request may be last
        for request in before:
            if self._can_run(request):
                self._pool.let_run(request)
        held: list[Request] = []
        short = sorted(self._short_of_room(), key=self._pool.order.rank)
        for request in short:
            if request.state is RequestState.INITIATION or request is self._victim:
                continue  # preempted, or about to be, for an earlier request
            # A request takes no memory while an earlier request waits for memory.
            if not self._has_room(request) and (held or not self._obtain(request)):
                held.append(request)
        if self._n_drafts and not held:
            self._grow_for_drafts(short)
        self._held = [one for one in held if one.state is not RequestState.INITIATION]
        for request in self._held:
            self._pool.hold_back(request)
        self._kv_manager.is_owing = bool(self._held)

    def settle(self, selected: Collection[Request]) -> None:
        """Does nothing: it does not matter here which requests are in a batch."""

    def is_due(self, request: Request) -> bool:
        """Returns whether a request must be preempted now: it was chosen for that, and another
        request still waits for memory. Called when no batch in flight contains the request any
        more."""
        if request is not self._victim:
            return False
        self._victim = None
        return any(one is not request for one in self._held)

    def note_preempted(self, request: Request) -> None:
        """Notes that a request has been preempted. Its wait for memory is over."""
        self._wanted.pop(request, None)
        if request is self._victim:
            self._victim = None
        if request in self._held:
            self._held.remove(request)

    def note_end(self, request: Request) -> None:
        """Learns which fraction of `max_tokens` an ended request has used. Also notes whether
        batches in flight still use the memory of the request, because that memory becomes free
        soon."""
        self.note_preempted(request)
        if request.n_in_flight:
            self._leaving.add(request)
        if request.generated_token_ids:
            self._kv_manager.expected_use.learn(
                len(request.generated_token_ids), request.max_new_tokens
            )

    def note_freed(self, request: Request) -> None:
        """Notes that the memory of a request is free."""
        self._leaving.discard(request)

    def _short_of_room(self) -> list[Request]:
        """Returns the requests that may be selected and whose reservations have no room for their
        next tokens and the largest number of drafts."""
        block_size = self._kv_manager.block_size
        return [
            request
            for request in self._pool.ready_by_place
            if (reservation := request.reservation) is not None
            and reservation.n_reserved_columns * block_size
            < request.n_tokens + request.n_awaited + self._n_drafts
        ]

    def _has_room(self, request: Request) -> bool:
        return self._kv_manager.has_room(_reservation_of(request), _n_tokens(request))

    def _grow_for_drafts(self, requests: Iterable[Request]) -> None:
        """Enlarges the reservations of requests for drafts, as far as memory is free. Must be
        called after all requests have got room for their next tokens, so that no request is
        preempted for a draft."""
        for request in requests:
            if request.reservation is not None:  # otherwise the request was just preempted
                n_wanted = min(_n_tokens(request) + self._n_drafts, request.max_sequence_len)
                self._kv_manager.grow(request.reservation, n_wanted)

    def _obtain(self, request: Request) -> bool:
        """Returns whether a request has enough memory now, after preempting other requests if
        needed."""
        kv_manager, reservation = self._kv_manager, _reservation_of(request)
        wanted = self._wanted.get(request)
        if wanted is None:
            if kv_manager.grow(reservation, _n_tokens(request)):
                return True
            request.n_wanted_blocks = max(1, 2 * request.n_wanted_blocks)
            wanted = _n_tokens(request) + (request.n_wanted_blocks - 1) * kv_manager.block_size
            wanted = self._wanted[request] = min(wanted, request.max_sequence_len)
        while not kv_manager.grow(reservation, wanted):
            if self._victim is not None or self._leaving:
                return False
            last = max(self._pool.running, key=self._pool.order.rank)
            if last.n_in_flight:
                self._victim = last
                self._pool.hold_back(last)
                return False
            self._preempt(last)
            if last is request:
                return False
        del self._wanted[request]
        return True


def _reservation_of(request: Request) -> Reservation:
    if request.reservation is None:
        raise ValueError(f"request {request.request_id} runs without a reservation")
    return request.reservation


def _n_tokens(request: Request) -> int:
    """Returns the number of tokens that a request has stored after its next iteration."""
    return request.n_scheduled + request.n_unscheduled
