"""A fair order: more important requests come first; among equally important ones, each client gets
its share.

Within a priority class, the next request is the earliest request of the client that has received
the least service (virtual token counters, Sheng et al., "Fairness in Serving Large Language
Models", OSDI'24). A prompt is charged to its client when the request is admitted, and an output
token when it is generated; both charges are divided by the client's weight. When a client returns
after a pause, its counter is raised to the least counter of the waiting clients, so that no client
saves up service. Therefore two clients that always have waiting requests of one class differ in
service by at most 2 max(w_p n_prompt, w_q n_slots), where n_prompt is the length of the longest
prompt and n_slots the number of K/V slots of all pipelines. Among clients with equal service, the
client that was admitted longest ago comes first. So a client that seldom sends requests does not
wait for the first requests of others. With a single client in a single class, the order is first
come, first served.

Classes come in the order of `priority`, but a waiting class rises by one class for every `ageing_s`
without an admission from the class. So class p has an admission within (p - p_min) `ageing_s`, plus
one admission of each other class. Within a class every client gets its turn, because a client that
is served falls behind the others: no request starves. Whole classes rise rather than single
requests. Otherwise the client that sends most requests would have the oldest ones and would come
first for that reason.

Among the requests of one client in a class, a request with more tokens in the prefix cache of the
pipeline that selects may be preferred to the first request. The reason is that memory has room for
few beginnings of sequences, so a pipeline should admit requests that share a beginning. With n
pipelines, only the first n `N_PREFERABLE` requests are considered, and the first request is passed
over at most n `MAX_PASSES` times. So a request waits for at most n `MAX_PASSES` + 1 admissions of
its client for itself and for each request that arrived before it.

Preempted requests come before all others, because they have begun and their prompts are charged
already. But a waiting request may be called: then no other request is admitted, and the called
request may take the place of a running one (`preemption/for_fairness.py`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import ClassVar, Self

from services.scheduler.core.clients.accounts import AccountUse
from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.order.fair_batch import Allowances, FairBatch
from services.scheduler.core.order.order import Clock, Order, OrderOptions
from services.scheduler.core.order.priorities import (
    ClientLine,
    Counters,
    MayBegin,
    PriorityClass,
    any_client,
)
from services.scheduler.core.request import Request

N_KEPT = 1024
"""Number of clients above which idle clients may be forgotten."""

MAX_CLIENTS = 65_536
"""Largest number of clients that are remembered without a request in the pool."""


class Fair(Order):
    """The fair order: by priority class, and within each class by the service that clients have
    received."""

    name: ClassVar[str] = "fair"
    heeds_clients: ClassVar[bool] = True

    def __init__(
        self,
        *,
        ageing_s: float,
        now: Clock,
        batch: FairBatch | None = None,
    ) -> None:
        """`now` returns the time in seconds. `batch` limits the tokens of each client in a batch.
        It is None if there are no such limits."""
        if ageing_s <= 0:
            raise ValueError(f"ageing_s must be more than 0, not {ageing_s}")
        self.ageing_s = ageing_s
        self.batch = batch
        self._now = now
        self._n_waiting = 0
        self._n_places = 0
        self._n_present = 0  # clients with requests
        self._allowances: Allowances | None = None  # limits of clients in the next batch
        self._called: Request | None = None
        self._called_to: int | None = None
        self._classes: dict[int, PriorityClass] = {}  # classes with requests
        self._preempted: dict[Request, None] = {}  # in the order of their places
        # By account name; None is the name for requests without an account.
        self._clients: dict[str | None, ServedClient] = {}
        self._sweep_at = N_KEPT
        self._last_backlogged = ServedClient()
        self._preferring: ClientLine | None = None  # a pipeline's preference holds here

    @classmethod
    def of(cls, options: OrderOptions, now: Clock) -> Self:
        """Returns an order without requests. `now` returns the time in seconds."""
        n_tokens = options.batch_tokens
        batch = None if n_tokens is None else FairBatch(n_tokens)
        return cls(ageing_s=options.ageing_s, now=now, batch=batch)

    @property
    def options(self) -> OrderOptions:
        """Options from which the order was made."""
        return OrderOptions(self.ageing_s, None if self.batch is None else self.batch.max_tokens)

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for priority_class in self._classes.values():
            yield from priority_class

    @property
    def has_rivals(self) -> bool:
        """Whether several clients have requests in the pool."""
        return self._n_present > 1

    @property
    def first_in_turn(self) -> Request | None:
        """The waiting request that comes next among those that have never run, or None if there is
        none."""
        return next(self._in_turn(), None)

    def first_to_call(self, running: Collection[Request]) -> Request | None:
        """Returns the first waiting request that has never run and wants no vector, among clients
        that may have another request in a batch. Returns None if there is no such request."""
        first = self.first_in_turn
        if self.batch is None and (first is None or not first.wants_vector):
            return first
        may_begin = any_client if self.batch is None else self.batch.room(running).may_begin
        return next((one for one in self._in_turn(may_begin) if not one.wants_vector), None)

    @property
    def first_preempted(self) -> Request | None:
        """The first waiting request that was preempted, or None if there is none."""
        return next(iter(self._preempted), None)

    def call(self, request: Request | None, *, place: int | None = None) -> None:
        """Calls a waiting request: no other request may be admitted before it. The request must
        never have run. When it is admitted, it gets the place `place` among the running requests,
        which must be free by then, or the last place if `place` is None. If `request` is None, ends
        the call, so that all requests may be admitted again."""
        self._called, self._called_to = request, place

    def prefer(
        self, n_cached: Callable[[Request], int], *, pipeline: int = 0, n_pipelines: int = 1
    ) -> None:
        """Gives the next turn to the request with the largest part in the prefix cache, among the
        first requests of the client whose turn is next. The choice holds until `end_preference` is
        called. `n_cached` returns the size of the cached part of a request in the memory of the
        pipeline that selects. This pipeline has the number `pipeline` among `n_pipelines`."""
        first = self.first_in_turn
        if first is not None:
            line = self._classes[first.priority].line_of(_client_of(first))
            line.prefer(n_cached, pipeline=pipeline, n_pipelines=n_pipelines)
            self._preferring = line

    def end_preference(self) -> None:
        """Lets the requests of each client come in the order of their arrival again."""
        if self._preferring is not None:
            self._preferring.preferred = None
            self._preferring = None

    def take_place(self) -> int:
        """Returns a new place in the order of running requests, after all earlier places."""
        self._n_places += 1
        return self._n_places - 1

    def add(self, request: Request) -> None:
        """Adds a request behind the other requests of its client in its class."""
        request.client = client = self._client_named(request.account)
        if client.n_waiting == 0:
            client.served = max(client.served, self._least_served())
        self._n_present += not client.n_requests
        client.n_requests += 1
        client.n_waiting += 1
        self._n_waiting += 1
        priority_class = self._classes.get(request.priority)
        if priority_class is None:
            priority_class = PriorityClass(request.priority, since=self._now())
            self._classes[request.priority] = priority_class
        priority_class.add(request, client)

    def restore(self, requests: Sequence[Request]) -> None:
        """Adds preempted requests. They come before all other waiting requests."""
        self._preempted = dict.fromkeys(sorted([*self._preempted, *requests], key=_place))
        self._n_waiting += len(requests)
        for request in requests:
            _client_of(request).n_running -= 1

    def admit(self, request: Request) -> None:
        """Removes an admitted request from the waiting ones, and charges its client for the prompt.
        The request gets the place after all running requests, unless `call` gave it another."""
        client = _client_of(request)
        client.n_running += 1
        if request in self._preempted:
            del self._preempted[request]
            self._n_waiting -= 1
            return
        self._withdraw(request).since = self._now()
        client.served += client.prompt_charge(request.n_prompt_tokens)
        request.place = client.turn = self.take_place()
        if request is self._called:
            if self._called_to is not None:
                request.place = self._called_to
            self.call(None)

    def remove(self, request: Request) -> None:
        """Removes a request that ends, whether the request waits or runs. Charges for the request
        remain."""
        client = _client_of(request)
        if request in self._preempted:
            del self._preempted[request]
            self._n_waiting -= 1
        elif request.place < 0:
            self._withdraw(request)
        else:
            client.n_running -= 1
        if request is self._called:
            self.call(None)
        client.n_requests -= 1
        self._n_present -= not client.n_requests

    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the running requests, then the preempted ones, then the other waiting requests in
        the order of their turns. While a request is called, it is the only waiting request that is
        yielded. If `waiting` is given, yields the running requests, and then exactly the requests
        in `waiting`."""
        if waiting is not None:
            return chain(ready, waiting)
        if self._called is not None:
            if self._called_to is None:
                return chain(ready, (self._called,))
            index = bisect_left(ready, self._called_to, key=_place)
            return chain(ready[:index], (self._called,), ready[index:])
        may_begin = any_client if self._allowances is None else self._allowances.may_begin
        return chain(ready, self._preempted, self._in_turn(may_begin))

    def batch_limits(
        self, running: Collection[Request], ready: Sequence[Request], *, pipeline: int = 0
    ) -> Allowances | None:
        """Returns, for each client, the number of tokens that it may have in the next batch.
        Returns None if no client is limited."""
        if self.batch is not None:
            self._allowances = self.batch.allowances(
                running, ready, self._called, pipeline=pipeline
            )
        return self._allowances

    def unlimited(
        self, ready: Sequence[Request], running: Collection[Request], called: Request
    ) -> Sequence[Request]:
        """Returns the requests in `ready` whose clients are not limited in the next batch of a
        pipeline if the request `called` is called. `running` are all requests that run in the
        pipeline."""
        if self.batch is None:
            return ready
        limits = self.batch.limits(Counter(map(_client_of, running)), called)
        return [one for one in ready if one.client not in limits]

    def may_begin(self, request: Request, running: Collection[Request]) -> bool:
        """Returns whether the client of a waiting request may have one more request in a pipeline.
        `running` are the requests that run in this pipeline."""
        client = _client_of(request)
        if self.batch is None or not self.has_rivals or not client.n_running:
            return True
        return self.batch.room(running).may_begin(client)

    def rank(self, request: Request) -> tuple[int, ...]:
        """Returns the rank of a request for preemption. The highest rank is preempted first. Among
        requests that were never preempted, the last admitted request of the least important class
        ranks highest. A request that was preempted before has the lowest rank, so that a stream of
        more important requests cannot keep it from ending."""
        if request.n_preemptions:
            return (-1, 0, request.place)
        return (0, request.priority, request.place)

    def _in_turn(self, may_begin: MayBegin = any_client) -> Iterator[Request]:
        counters = Counters(self._n_places)
        if len(self._classes) != 1:
            return self._across_classes(counters, may_begin)
        (only,) = self._classes.values()
        return only.in_turn(counters, may_begin)

    def _across_classes(self, counters: Counters, may_begin: MayBegin) -> Iterator[Request]:
        now = self._now()
        lines = {
            one: (one.in_turn(counters, may_begin), one.since) for one in self._classes.values()
        }
        while lines:
            first = min(lines, key=lambda one: self._rank(one, now - lines[one][1]))
            line, _ = lines[first]
            lines[first] = line, now
            request = next(line, None)
            if request is None:
                del lines[first]
            else:
                yield request

    def _rank(self, priority_class: PriorityClass, waited_s: float) -> tuple[int, int]:
        """Returns the rank of a class that has waited `waited_s` seconds for an admission. The
        lowest rank comes first. If two classes have risen to equal ranks, the less important class
        comes first, because it has waited longer."""
        priority = priority_class.priority
        return priority - int(waited_s / self.ageing_s), -priority

    def _least_served(self) -> float:
        """Returns the least service that a client with waiting requests has received. If no
        requests wait, returns the service of the client that was the last to have a waiting
        request."""
        tops = [priority_class.least_served() for priority_class in self._classes.values()]
        return min(tops, default=self._last_backlogged.served)

    def _withdraw(self, request: Request) -> PriorityClass:
        client = _client_of(request)
        self._n_waiting -= 1
        client.n_waiting -= 1
        self._last_backlogged = client
        priority_class = self._classes[request.priority]
        priority_class.remove(request, client)
        if not len(priority_class):
            del self._classes[request.priority]
        return priority_class

    def _client_named(self, account: AccountUse | None) -> ServedClient:
        name = None if account is None else account.name
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= self._sweep_at:
                self._forget()
            client = self._clients[name] = ServedClient()
        if account is not None and client.weight != account.limits.weight:
            client.set_weight(account.limits.weight)
        return client

    def _forget(self) -> None:
        """Forgets clients without requests if they have been served no more than every client that
        has waiting requests. Nothing is lost: the `served` of such a client would be raised on its
        return anyway. If too many clients remain, forgets all clients without requests. Each of
        these gains at most the largest possible difference between clients."""
        least = self._least_served()
        known = self._clients.items()
        kept = {n: one for n, one in known if one.n_requests or one.served > least}
        if len(kept) >= MAX_CLIENTS:
            kept = {name: one for name, one in known if one.n_requests}
        self._clients = kept
        # The next sweep comes at twice the number of clients, so its cost per client is constant.
        self._sweep_at = max(N_KEPT, 2 * len(kept))


def _place(request: Request) -> int:
    return request.place


def _client_of(request: Request) -> ServedClient:
    client = request.client
    assert client is not None
    return client
