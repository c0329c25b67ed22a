"""Giving way, in the fair order: requests that run make room for those of clients with less.

Without this a client that has everything keeps it until its requests end, however little another
one asks for. Nothing of it happens while there is only one client, or room for all.

A client may have more if it has been served no more than another one, and if with one place more
it would still have no more than its share beside it. Then its first request is called, and the
other's last one gives way:

- Where the batch is full, the two swap places: the one that gives way keeps its memory and is the
  next to ride when somebody has ended.
- Where K/V memory is full, it is put down, to be recomputed. That costs its tokens, so it is done
  only when its client has been served by as many more.

Nobody waits for ever by this, and no work is repeated without end. Only a request that has never
run is called, and one iteration calls one; so places are swapped as often as requests are admitted
at most, and for each as few are put down as make room for it. Who gave way comes before those of
its client that have never run, and before all others as soon as their clients have their shares.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from services.scheduler.core.clients.client import Client
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies import Policy
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.request_pool import RequestPool

_CLIENT = attrgetter("client")


class GivingWay:
    """The request that is called for the next batch, and those that give way to it."""

    def __init__(
        self,
        pool: RequestPool,
        order: Fair,
        kv_manager: KVManager,
        policy: Policy,
        *,
        can_run: Callable[[Request], bool],
        put_down: Callable[[Request], None],
    ) -> None:
        """`can_run` says whether a request could join the next batch; `put_down` puts one down that
        is in no batch."""
        self._pool = pool
        self._order = order
        self._kv_manager = kv_manager
        self._policy = policy
        self._can_run = can_run
        self._put_down = put_down
        self._called: Request | None = None
        self._swapped: Request | None = None  # who gives its place to the one that is called
        self._leaving: dict[Request, None] = {}  # held back until they can be put down
        order.call(None)  # whoever was, in the epoch before

    def make_way(self) -> None:
        """Calls the request whose turn it is, if others must give way to it."""
        if self._called is not None:
            self._stop()
        if not self._order.has_rivals or self._kv_manager.is_owing or self._pool.has_suspects:
            return
        first = self._order.first_to_call(self._pool.running)
        if first is None:
            return
        n_running = Counter(map(_CLIENT, self._pool.running))
        yields = self._yielding_client(first, n_running)
        if yields is None and self._order.first_put_down is None:
            return
        n_missing = self._kv_manager.n_missing_blocks(first)
        if n_missing:
            if yields is not None:
                self._take_memory(first, yields, n_missing)
        elif self._policy.is_full(ready := self._pool.ready_by_place):
            self._take_place(first, ready)
        elif self._goes_before_put_down(first):
            self._call(first)

    def settle(self, admitted: Collection[Request]) -> None:
        """Notes who is admitted to the batch that is selected, before they are."""
        if self._swapped is not None and self._called in admitted:
            self._pool.move(self._swapped, self._order.take_place())

    def must_leave(self, request: Request) -> bool:
        """Returns whether a request is to be put down, now that it is in no batch."""
        if request not in self._leaving:
            return False
        del self._leaving[request]
        return self._called is not None and self._called.state is RequestState.INITIATION

    def forget(self, request: Request) -> None:
        """Notes that a request has ended, or was put down."""
        self._leaving.pop(request, None)

    def _stop(self) -> None:
        """Ends a call; all is decided anew."""
        self._order.call(None)
        self._called = self._swapped = None
        for request in self._leaving:
            if self._can_run(request):
                self._pool.let_run(request)
        self._leaving.clear()

    def _call(self, request: Request, *, place: int | None = None) -> None:
        self._called = request
        self._order.call(request, place=place)

    def _take_place(self, first: Request, ready: Sequence[Request]) -> None:
        """Calls a request to the place of one that rides, if its client may have more."""
        riding = ready[: self._policy.max_batch_size]
        n_riding: Counter[Client | None] = Counter(map(_CLIENT, riding))
        if self._pool.n_running > len(ready):
            known = set(ready)
            others = (one for one in self._pool.running if one.n_in_flight and one not in known)
            n_riding.update(map(_CLIENT, others))
        yields = self._yielding_client(first, n_riding)
        if yields is None:
            return
        for request in reversed(riding):
            if request.client is yields and request.priority >= first.priority:
                self._swapped = request
                self._call(first, place=request.place)
                return

    def _take_memory(self, first: Request, yields: Client, n_missing: int) -> None:
        """Puts down requests of a client for the memory that another one's needs; those that are
        in flight when they return."""
        mine, n_left, chosen, cost = _client_of(first), yields.n_running, [], 0.0
        for request in self._last_of(yields):
            if n_missing <= 0:
                break
            if request.priority < first.priority or request.reservation is None:
                continue
            if not mine.may_have_more(yields, mine.n_running, n_left):
                return
            n_left -= 1
            chosen.append(request)
            cost += yields.prompt_charge(request.n_tokens)
            n_missing -= self._kv_manager.n_freed_blocks(request.reservation, first)
        if n_missing > 0 or yields.served - mine.served < cost:
            return
        self._call(first)
        for request in chosen:
            if request.n_in_flight:
                self._pool.hold_back(request)
                self._leaving[request] = None
            else:
                self._put_down(request)

    def _goes_before_put_down(self, first: Request) -> bool:
        """Returns whether the first of those that were put down would give way again."""
        request = self._order.first_put_down
        if request is None or request.priority < first.priority:
            return False
        mine, other = _client_of(first), _client_of(request)
        return mine.may_have_more(other, mine.n_running, other.n_running + 1)

    def _yielding_client(self, first: Request, n_places: Counter[Client | None]) -> Client | None:
        """Returns the client with most by its weight of those beside which the request's may have
        more."""
        mine = _client_of(first)
        n_mine, most, most_places = n_places[mine], None, 0.0
        for one, n_its in n_places.items():
            if one is None or n_its < 2 or n_its / one.weight <= most_places:
                continue
            if mine.may_have_more(one, n_mine, n_its):
                most, most_places = one, n_its / one.weight
        return most

    def _last_of(self, client: Client) -> Iterable[Request]:
        """Returns the requests of a client that run, by their places from the last one on."""
        running = [request for request in self._pool.running if request.client is client]
        return sorted(running, key=lambda request: request.place, reverse=True)


def _client_of(request: Request) -> Client:
    client = request.client
    assert client is not None
    return client
