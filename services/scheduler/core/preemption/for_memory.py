"""Preemption for memory, where admission is optimistic: the last request gives up its blocks.

A request mostly ends long before `max_tokens`. So it reserves what its tokens need now, and less
than the share of its `max_tokens` that others have used lately. What it needs beyond that, it gets
when it comes to it. If there is no block then, the request that comes last of those that run is
preempted: it gives up its memory and waits at its place to be computed anew, with the tokens that
it has. A request in a batch in flight is preempted when the batch has returned, and the request
that needs the memory waits for that.

No request waits for ever. The first one is never preempted for another, and has all memory when all
others have been preempted; so it goes on to its end, and then another request is the first. Nor is
work repeated for ever. A request that could not grow takes twice as much as the last time, so this
happens to a request log2(its blocks) + 2 times at most. A preempted request reserves twice as much
each time that it comes back, and its whole life after five. So then it can be preempted only for
one that comes before it and runs beside it, and as often as that one cannot grow.

To an observer requests are served in their order: none is admitted while an admitted one waits for
memory, and preempted requests come before the requests behind them that have not run.
"""

from collections.abc import Callable, Collection

from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.request_pool import RequestPool


class ForMemory:
    """The requests that wait for memory, and the one from which memory is taken back."""

    def __init__(
        self,
        pool: RequestPool,
        kv_manager: KVManager,
        *,
        can_run: Callable[[Request], bool],
        preempt: Callable[[Request], None],
    ) -> None:
        """`can_run` says whether a request could join the next batch; `preempt` preempts a request
        that is in no batch."""
        self._pool = pool
        self._kv_manager = kv_manager
        self._can_run = can_run
        self._preempt = preempt
        self._held: list[Request] = []  # by rank; they wait for memory
        self._wanted: dict[Request, int] = {}  # tokens for which each request in it waits
        self._victim: Request | None = None  # preempted as soon as it is in no batch
        self._leaving: set[Request] = set()  # ended, and their memory is not free yet

    def prepare(self) -> None:
        """Sees to it that all requests that may be selected have memory for their next tokens, and
        holds back the others."""
        before = self._held if self._victim is None else [*self._held, self._victim]
        self._victim = None  # there may be memory now, and another may be the last
        for request in before:
            if self._can_run(request):
                self._pool.let_run(request)
        held: list[Request] = []
        for request in self._pool.ready:
            if request.state is RequestState.INITIATION or request is self._victim:
                continue  # it was preempted, or is to be, for a request before it
            # A request takes no memory for which one before it waits.
            if not self._has_room(request) and (held or not self._obtain(request)):
                held.append(request)
        self._held = [one for one in held if one.state is not RequestState.INITIATION]
        for request in self._held:
            self._pool.hold_back(request)
        self._kv_manager.is_owing = bool(self._held)

    def settle(self, selected: Collection[Request]) -> None:
        """Needs to know nothing of the batch."""

    def is_due(self, request: Request) -> bool:
        """Returns whether a request is preempted, now that it is in no batch: another one still
        waits for its memory."""
        if request is not self._victim:
            return False
        self._victim = None
        return any(one is not request for one in self._held)

    def note_preempted(self, request: Request) -> None:
        """Forgets what a request has waited for."""
        self._wanted.pop(request, None)
        if request is self._victim:
            self._victim = None
        if request in self._held:
            self._held.remove(request)

    def note_end(self, request: Request) -> None:
        """Learns how much of its `max_tokens` a request has used, and whether its memory will be
        free soon."""
        self.note_preempted(request)
        if request.n_in_flight:
            self._leaving.add(request)
        if request.generated_token_ids:
            self._kv_manager.expected_use.learn(
                len(request.generated_token_ids), request.max_new_tokens
            )

    def note_freed(self, request: Request) -> None:
        """Notes that the memory of a request that has ended is free."""
        self._leaving.discard(request)

    def _has_room(self, request: Request) -> bool:
        return self._kv_manager.has_room(_reservation_of(request), _n_tokens(request))

    def _obtain(self, request: Request) -> bool:
        """Returns whether a request could grow, if need be at the cost of others."""
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
            last = self._pool.last
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
    """Returns the tokens of a request that are stored when it has run once more."""
    return request.n_scheduled + request.n_unscheduled
