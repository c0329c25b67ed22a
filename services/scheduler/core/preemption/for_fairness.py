"""Preemption for fairness: running requests make room for clients that have less than their share.

Without this preemption, a client that uses the whole machine would keep it until its requests end,
however little another client asks for. No request is preempted here while there is only one client,
or room for all requests.

A client may take a place among the running requests from another client under two conditions:
first, it has been served no more than the other client; second, after one place has moved, it would
not have more places than the other client, relative to their weights. Requests that run in other
pipelines count as places, too. Then the first waiting request of the client is called, and the last
running request of the other client is preempted:

- Where the batch is full, the called request takes the place of the other one, if this place does
  not lie behind a prompt that takes all tokens of the batch. The preempted request keeps its
  memory, and is next in the batch when another request has ended.
- Where K/V memory is full, the preempted request gives up its memory and is computed again later.
  This costs the computation of its tokens. So the client of the preempted request must have been
  served more than the client of the called request, by at least the charge for these tokens.

This preemption lets no request wait for ever, and repeats no work without end. Only a request that
has never run and wants no vector is called, and one iteration calls at most one request. So places
are swapped at most as often as requests are admitted, and for each called request only as many
requests are preempted as make room. A preempted request comes before the requests of its client
that have never run. It comes before all other requests as soon as their clients have their shares.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies import Policy
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.request_pool import RequestPool

_CLIENT = attrgetter("client")


class ForFairness:
    """Decides which waiting request is called (it may then be admitted before all others), and
    which running requests are preempted to make room for it."""

    def __init__(
        self,
        pool: RequestPool,
        order: Fair,
        kv_manager: KVManager,
        policy: Policy,
        *,
        can_run: Callable[[Request], bool],
        preempt: Callable[[Request], None],
    ) -> None:
        """`can_run` says whether a request could join the next batch. `preempt` preempts a request
        that is in no batch."""
        self._pool = pool
        self._order = order
        self._kv_manager = kv_manager
        self._policy = policy
        self._can_run = can_run
        self._preempt = preempt
        self._called: Request | None = None
        self._swapped: Request | None = None  # gives its place to the called request
        self._due: dict[Request, None] = {}  # held back; preempted once they are in no batch
        order.call(None)  # ends a call of the previous epoch

    def prepare(self) -> None:
        """Calls at most one waiting request, so that it is admitted next: one for which running
        requests are preempted or give their places, or one that may be admitted before the first
        preempted request."""
        self._prefer()
        if self._called is not None:
            self._stop()
        else:
            self._order.call(None)  # a call of another pipeline, whose selection is over
        has_rivals = self._order.has_rivals and self._pool.n_waiting_answers > 0
        if not has_rivals or self._kv_manager.is_owing or self._pool.has_trials:
            return
        first = self._order.first_to_call(self._pool.running)
        if first is None:
            return
        n_running = Counter(map(_CLIENT, self._pool.running))
        richest = self._richest(first, n_running, n_running, n_running.keys())
        if richest is None and self._order.first_preempted is None:
            return
        if not self._pool.may_admit(first):
            return
        n_missing = _n_missing_blocks(self._kv_manager, first)
        if n_missing:
            if richest is not None:
                self._take_memory(first, richest, n_missing)
        elif self._policy.is_full(ready := self._pool.ready_by_place):
            self._take_place(first, ready, n_running)
        elif self._goes_before_preempted(first):
            self._call(first)

    def _prefer(self) -> None:
        """Makes the order prefer the request with the largest cached part among the first requests
        of the next client (`Fair.prefer`). Does so only if there are several pipelines, or if
        cached blocks were ever evicted. Otherwise cached tokens are not lost while a request
        waits."""
        self._order.end_preference()  # of the last pipeline that has selected
        n_pipelines = self._pool.shared.placement.n_open
        if self._kv_manager.blocks.n_evicted or n_pipelines > 1:
            n_cached = self._kv_manager.n_cached_columns
            self._order.prefer(n_cached, pipeline=self._pool.number, n_pipelines=n_pipelines)

    def settle(self, selected: Collection[Request]) -> None:
        """If the called request is in the selected batch and took the place of a running request,
        moves this running request to the last place."""
        if self._swapped is not None and self._called in selected:
            self._pool.move(self._swapped, self._order.take_place())

    def is_due(self, request: Request) -> bool:
        """Returns whether a request must be preempted now: it was chosen for that, and the called
        request still waits. Called when no batch in flight contains the request any more."""
        if request not in self._due:
            return False
        del self._due[request]
        return self._called is not None and self._called.state is RequestState.INITIATION

    def note_preempted(self, request: Request) -> None:
        """Notes that a request has been preempted, so that it need not be preempted any more."""
        self._due.pop(request, None)

    def note_end(self, request: Request) -> None:
        """Notes that a request has ended, so that it need not be preempted any more."""
        self._due.pop(request, None)

    def note_freed(self, request: Request) -> None:
        """Does nothing: free memory is looked up in each iteration."""

    def _stop(self) -> None:
        """Ends the preemption for a called request. The requests that were held back for it may run
        again. `prepare` decides anew."""
        self._order.call(None)
        self._called = self._swapped = None
        for request in self._due:
            if self._can_run(request):
                self._pool.let_run(request)
        self._due.clear()

    def _call(self, request: Request, *, place: int | None = None) -> None:
        self._called = request
        self._order.call(request, place=place)

    def _take_place(
        self,
        first: Request,
        ready: Sequence[Request],
        n_running: Counter[ServedClient | None],
    ) -> None:
        """Gives the request `first` the place of a request in the batch, if the client of `first`
        may have more running requests."""
        riding = ready[: self._policy.max_batch_size]
        n_riding: Counter[ServedClient | None] = Counter(map(_CLIENT, riding))
        if self._pool.n_running > len(ready):
            known = set(ready)
            others = (one for one in self._pool.running if one.n_in_flight and one not in known)
            n_riding.update(map(_CLIENT, others))
        if self._richest(first, n_riding, n_running, n_riding.keys()) is None:
            return  # usual; the search below would take longer
        reached = self._reached(riding, first)
        richest = self._richest(first, n_riding, n_running, {*map(_CLIENT, reached)})
        if richest is None:
            return
        for request in reversed(reached):
            if request.client is richest and request.priority >= first.priority:
                self._swapped = request
                self._call(first, place=request.place)
                return

    def _reached(self, riding: Sequence[Request], first: Request) -> Sequence[Request]:
        """Returns the requests in `riding`, which are sorted by place, up to the prompt that takes
        the last tokens of the next batch. A prompt with a later place would have no tokens.
        Prompts of limited clients leave tokens (`fair_batch.py`)."""
        taking = self._order.unlimited(riding, self._pool.running, first)
        n_before = bisect_left(
            range(len(taking)), True, key=lambda index: self._policy.is_full(taking[: index + 1])
        )
        if n_before == len(taking):
            return riding
        return riding[: riding.index(taking[n_before]) + 1]

    def _take_memory(self, first: Request, richest: ServedClient, n_missing: int) -> None:
        """Calls the request `first`, and preempts requests of the richest client to free the blocks
        that `first` lacks. A request in flight is preempted when its batch has returned. Does
        nothing if the client of `first` may not have more running requests, or if these requests
        cannot free enough blocks."""
        mine, n_left, chosen, cost = _client_of(first), richest.n_running, [], 0.0
        for request in self._last_of(richest):
            if n_missing <= 0:
                break
            if request.priority < first.priority or request.reservation is None:
                continue
            if not mine.may_have_more(richest, mine.n_running, n_left):
                return
            n_left -= 1
            chosen.append(request)
            cost += richest.prompt_charge(request.n_tokens)
            n_missing -= _n_freed_blocks(self._kv_manager, request.reservation, first)
        if n_missing > 0 or richest.served - mine.served < cost:
            return
        self._call(first)
        for request in chosen:
            if request.n_in_flight:
                self._pool.hold_back(request)
                self._due[request] = None
            else:
                self._preempt(request)

    def _goes_before_preempted(self, first: Request) -> bool:
        """Returns whether the request `first` may be admitted before the first waiting request that
        was preempted."""
        request = self._order.first_preempted
        if request is None or request.priority < first.priority:
            return False
        mine, other = _client_of(first), _client_of(request)
        return mine.may_have_more(other, mine.n_running, other.n_running + 1)

    def _richest(
        self,
        first: Request,
        n_places: Counter[ServedClient | None],
        n_running: Counter[ServedClient | None],
        among: Collection[ServedClient | None],
    ) -> ServedClient | None:
        """Returns the client from which the client of the request `first` may take a place. If
        there are several such clients, returns the one with the most places relative to its weight.
        Returns None if there is none. Only clients in `among` that have a place in this pipeline
        are considered.

        `n_places` counts the places of each client in this pipeline, and `n_running` the running
        requests of each client in this pipeline.
        """
        mine = _client_of(first)
        n_mine = n_places[mine] + mine.n_running - n_running[mine]
        most, most_places = None, 0.0
        for one, n_here in n_places.items():
            if one is None or one not in among:
                continue
            n_its = n_here + one.n_running - n_running[one]
            if n_its < 2 or n_its / one.weight <= most_places:
                continue
            if mine.may_have_more(one, n_mine, n_its):
                most, most_places = one, n_its / one.weight
        return most

    def _last_of(self, client: ServedClient) -> Iterable[Request]:
        """Returns the running requests of a client in this pipeline, sorted by place in descending
        order."""
        running = [request for request in self._pool.running if request.client is client]
        return sorted(running, key=lambda request: request.place, reverse=True)


def _client_of(request: Request) -> ServedClient:
    client = request.client
    assert client is not None
    return client


def _n_missing_blocks(kv_manager: KVManager, request: Request) -> int:
    """Returns how many blocks must become free before a request can be admitted. The number is at
    least one if no row is free, because a row becomes free only together with the blocks of another
    request."""
    n_columns = kv_manager.columns_for(kv_manager.expected_use.n_tokens(request))
    n_left = kv_manager.n_blocks - kv_manager.n_reserved_blocks
    n_least = 0 if kv_manager.rows.has_free else 1
    n_missing = kv_manager.n_blocks_for(n_columns, request.n_tokens) - n_left
    if n_missing <= 0:
        return n_least
    cache = kv_manager.blocks.cache_for(request)
    found = cache.find(request)
    n_unscheduled = request.n_tokens - found.n_columns * kv_manager.block_size
    n_missing = kv_manager.n_blocks_for(n_columns, n_unscheduled) - n_left
    return max(n_least, n_missing - cache.n_in_use(found.block_ids))


def _n_freed_blocks(kv_manager: KVManager, reservation: Reservation, request: Request) -> int:
    """Returns how many more blocks `request` could use if `reservation` were released. Blocks of
    the reservation that other requests share are not counted. Blocks that `request` would share
    with the reservation, because both have the same beginning, are not counted either."""
    cache = kv_manager.blocks.cache_for(request)
    n_freed = reservation.n_reserved_blocks
    n_freed -= kv_manager.prefix_cache.n_shared(reservation.block_ids)
    return n_freed - len({*cache.find(request).block_ids} & {*reservation.block_ids})
