"""The waiting requests of one priority in the fair order, sorted by the service that their clients
have received."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice

from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.request import Request

N_PREFERABLE = 16
"""Number of a client's first requests among which one may be preferred. With n pipelines, n times
as many requests are considered."""

MAX_PASSES = 8
"""Largest number of times that a client's first request is passed over. With n pipelines, it may be
passed over n times as often."""

MayBegin = Callable[[ServedClient], bool]
"""Function that returns whether a request of a client may begin."""


def any_client(client: ServedClient) -> bool:
    """Returns True: requests of any client may begin."""
    return True


class ClientLine:
    """The waiting requests of one client in one priority class, by arrival. A line is never
    empty."""

    __slots__ = ("choices", "client", "entry", "n_passes", "preferred", "requests")

    def __init__(self, client: ServedClient) -> None:
        self.client = client
        self.requests: dict[Request, None] = {}
        self.entry: _Entry | None = None  # in the heap; None once the line is empty
        self.preferred: Request | None = None  # comes first, before the oldest request
        self.choices: dict[int, Request] = {}  # the requests that pipelines prefer
        self.n_passes = 0  # times that the oldest request was passed over

    def prefer(
        self, n_cached: Callable[[Request], int], *, pipeline: int, n_pipelines: int
    ) -> None:
        """Puts the request with the largest part in the prefix cache first. Only the first requests
        of the line are compared. `n_cached` returns the cached part of a request in the memory of
        the pipeline with the number `pipeline`. A request that another pipeline prefers is not
        chosen. A choice is kept until the chosen request leaves the line, so that most selections
        need no search."""
        if len(self.requests) == 1 or self.n_passes >= MAX_PASSES * n_pipelines:
            return
        chosen = self.choices.get(pipeline)
        if chosen is None:
            of_others = set(self.choices.values())
            head = islice(self.requests, N_PREFERABLE * n_pipelines)
            free = [one for one in head if one not in of_others]
            chosen = max(free, key=n_cached, default=self.oldest)  # the first of several
            self.choices[pipeline] = chosen
        self.preferred = chosen

    def remove(self, request: Request) -> None:
        """Removes a request from the line."""
        if request is self.oldest:
            self.n_passes = 0
        elif request is self.preferred:
            self.n_passes += 1
        if request is self.preferred:
            self.preferred = None
        if self.choices:
            self.choices = {n: one for n, one in self.choices.items() if one is not request}
        del self.requests[request]

    @property
    def oldest(self) -> Request:
        """The request in this line that arrived first."""
        return next(iter(self.requests))

    def in_order(self) -> Iterator[Request]:
        """Returns the requests, the preferred one first and then by arrival."""
        preferred = self.preferred
        if preferred is None:
            return iter(self.requests)
        return chain((preferred,), (one for one in self.requests if one is not preferred))

    def entry_now(self) -> "_Entry":
        client = self.client
        return client.served, client.turn, self.oldest.arrival, self

    def arrival_of(self, request: Request) -> int:
        """Returns the arrival number that decides when a request has its turn. A preferred request
        takes the turn of the oldest request."""
        return self.oldest.arrival if request is self.preferred else request.arrival


_Entry = tuple[float, int, int, ClientLine]
"""Heap entry of a line: `served` and `turn` of its client, the arrival number of its oldest
request, and the line itself."""

_Ahead = tuple[float, int, int, int, ClientLine, Iterator[Request], Request | None]
"""Heap entry of a line during iteration: `served`, `turn` and arrival as in `_Entry`, the index of
the entry in the class's heap, the line, the requests after the next one, and the next request. The
next request is None until the line has been examined."""


_NONE: Iterator[Request] = iter(())


class PriorityClass:
    """The waiting requests of one priority class; iterating yields them in no particular order.

    The lines of clients are in a heap, sorted by the service that each client had received when its
    line was last examined. Service only grows, so an outdated entry is replaced when it reaches the
    top. An entry that its line no longer refers to is dropped when the entry reaches the top, or
    when there are too many such entries.
    """

    def __init__(self, priority: int, *, since: float) -> None:
        self.priority = priority
        self.since = since
        """Time of the last admission from the class. Before the first admission, it is the time at
        which the class began to wait."""
        self._n_requests = 0
        self._lines: dict[ServedClient, ClientLine] = {}
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return self._n_requests

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line.requests

    def add(self, request: Request, client: ServedClient) -> None:
        self._n_requests += 1
        line = self._lines.get(client)
        if line is not None:
            line.requests[request] = None
            return
        line = self._lines[client] = ClientLine(client)
        line.requests[request] = None
        line.entry = line.entry_now()
        heappush(self._heap, line.entry)

    def remove(self, request: Request, client: ServedClient) -> None:
        self._n_requests -= 1
        line = self._lines[client]
        line.remove(request)
        if not line.requests:
            del self._lines[client]
            line.entry = None
        if len(self._heap) > 2 * len(self._lines) + 16:
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapify(self._heap)

    def line_of(self, client: ServedClient) -> ClientLine:
        """Returns the line of a client. The client must have a waiting request in the class."""
        return self._lines[client]

    def least_served(self) -> float:
        """Returns the least service that a client in the class has received. The class must not be
        empty."""
        heap = self._heap
        while True:
            entry = heap[0]
            line = entry[3]
            if line.entry is not entry:
                heappop(heap)
                continue
            now = line.entry_now()
            if now == entry:
                return now[0]
            line.entry = now
            heapreplace(heap, now)

    def in_turn(self, counters: "Counters", may_begin: "MayBegin") -> Iterator[Request]:
        """Yields requests in the order that results if each is admitted before the caller asks for
        the next. A request is yielded only if `may_begin` is then true for its client. `counters`
        records the charges of these assumed admissions.

        The heap is searched from its top and is not changed. Only the entries before the yielded
        requests are examined.
        """
        self.least_served()  # brings the top up to date
        heap = self._heap
        served, turn, arrival, line = heap[0]
        ahead: list[_Ahead] = [(served, turn, arrival, 0, line, _NONE, None)]
        while ahead:
            served, turn, arrival, index, line, requests, request = heappop(ahead)
            if request is None:
                for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                    child_served, child_turn, child_arrival, below = heap[child]
                    entry = (child_served, child_turn, child_arrival, child, below, _NONE, None)
                    heappush(ahead, entry)
                if line.entry is not heap[index]:
                    continue
                requests = line.in_order()
                request = next(requests)
            client = line.client
            if not may_begin(client):
                continue
            now = counters.of(client)
            came = line.arrival_of(request)
            if (*now, came) != (served, turn, arrival):
                heappush(ahead, (*now, came, -1, line, requests, request))
                continue
            yield request
            counters.charge(client, request)
            request = next(requests, None)
            if request is not None:
                now = counters.of(client)
                heappush(ahead, (*now, request.arrival, -1, line, requests, request))


class Counters:
    """Service and last turns of clients, as they would be after assumed admissions. The clients
    themselves are not changed."""

    def __init__(self, n_places: int) -> None:
        self._n_places = n_places
        self._changed: dict[ServedClient, tuple[float, int]] = {}

    def of(self, client: ServedClient) -> tuple[float, int]:
        return self._changed.get(client) or (client.served, client.turn)

    def charge(self, client: ServedClient, request: Request) -> None:
        served, _ = self.of(client)
        charged = served + client.prompt_charge(request.n_prompt_tokens)
        self._changed[client] = charged, self._n_places
        self._n_places += 1
