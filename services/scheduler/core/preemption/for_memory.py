"""Optimistic admission: memory is lent beyond what is reserved, and taken back from the last.

A request mostly ends long before `max_tokens`. So it reserves what its tokens need now, and less
than the share of its `max_tokens` that others have used lately. What it needs beyond that, it gets
when it comes to it. If there is no block then, the one that comes last of those that run is put
down: it gives up its memory and waits at its place to be recomputed, with the tokens that it has.
One that is in a batch in flight is put down when the batch has returned, and who needs the memory
waits for that.

Nobody waits for ever. Who comes first is never put down for another, and has all memory when all
others have been put down; so it goes on to its end, and then another comes first. Nor is work
repeated for ever. Who could not grow takes twice as much as the last time, so this happens to a
request log2(its blocks) + 2 times at most. Who has been put down reserves twice as much each time
that it comes back, and its whole life after five. So then it can be put down again only for one
that comes before it and runs beside it, and as often as that one cannot grow.

To an observer requests are served in their order: nobody is admitted while somebody waits for
memory, and who was put down comes before those behind it that have not run.
"""

from collections.abc import Callable

from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.request_pool import RequestPool


class Lending:
    """The requests that wait for memory, and the one from which it is taken back."""

    def __init__(
        self,
        pool: RequestPool,
        kv_manager: KVManager,
        *,
        can_run: Callable[[Request], bool],
        put_down: Callable[[Request], None],
    ) -> None:
        """`can_run` says whether a request could join the next batch; `put_down` puts one down that
        is in no batch."""
        self.n_leaving = 0
        """Requests that have ended, and whose memory is free when their last batch returns."""
        self._pool = pool
        self._kv_manager = kv_manager
        self._can_run = can_run
        self._put_down = put_down
        self._held: list[Request] = []
        self._wanted: dict[Request, int] = {}  # tokens for which those that could not grow wait
        self._yielding: Request | None = None

    def must_yield(self, request: Request) -> bool:
        """Returns whether a request is to be put down, now that it is in no batch: another one
        still waits for its memory."""
        if request is not self._yielding:
            return False
        self._yielding = None
        return any(one is not request for one in self._held)

    def forget(self, request: Request) -> None:
        """Notes that a request has ended, or was put down."""
        self._wanted.pop(request, None)
        if request is self._yielding:
            self._yielding = None
        if request in self._held:
            self._held.remove(request)

    def make_room(self) -> None:
        """Sees to it that all that may be selected have memory for their next tokens, and holds
        back the others."""
        before = self._held if self._yielding is None else [*self._held, self._yielding]
        self._yielding = None  # there may be memory now, and another may be the last
        for request in before:
            if self._can_run(request):
                self._pool.let_run(request)
        held: list[Request] = []
        for request in self._pool.ready:
            if request.state is RequestState.INITIATION or request is self._yielding:
                continue  # it was put down, or is to be, for one before it
            # Who comes later takes no memory for which somebody before it waits.
            if not self._has_room(request) and (held or not self._obtain(request)):
                held.append(request)
        self._held = [one for one in held if one.state is not RequestState.INITIATION]
        for request in self._held:
            self._pool.hold_back(request)
        self._kv_manager.is_owing = bool(self._held)

    def _has_room(self, request: Request) -> bool:
        reservation = request.reservation
        if reservation is None:
            raise ValueError(f"request {request.request_id} runs without a reservation")
        return self._kv_manager.has_room(reservation, _n_tokens(request))

    def _obtain(self, request: Request) -> bool:
        """Returns whether a request could grow, if need be at the cost of others."""
        kv_manager, reservation = self._kv_manager, request.reservation
        if reservation is None:
            raise ValueError(f"request {request.request_id} runs without a reservation")
        wanted = self._wanted.get(request)
        if wanted is None:
            if kv_manager.grow(reservation, _n_tokens(request)):
                return True
            request.n_lent_blocks = max(1, 2 * request.n_lent_blocks)
            wanted = _n_tokens(request) + (request.n_lent_blocks - 1) * kv_manager.block_size
            wanted = self._wanted[request] = min(wanted, request.max_sequence_len)
        while not kv_manager.grow(reservation, wanted):
            if self._yielding is not None or self.n_leaving:
                return False
            last = self._pool.last
            if last.n_in_flight:
                self._yielding = last
                self._pool.hold_back(last)
                return False
            self._put_down(last)
            if last is request:
                return False
        del self._wanted[request]
        return True


def _n_tokens(request: Request) -> int:
    """Returns the tokens of a request that are stored when it has run once more."""
    return request.n_scheduled + request.n_unscheduled
