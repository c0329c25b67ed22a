"""The waiting requests of one priority in the fair order, by the counters of their clients."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.request import Request

N_PREFERABLE = 16
"""Number of a client's first requests that may be preferred."""

MAX_PASSES = 8
"""Largest number of times that a client's first request is passed over."""

MayBegin = Callable[[ServedClient], bool]
"""Whether a request of a client may begin."""


def any_client(client: ServedClient) -> bool:
    """Returns True: requests of any client may begin."""
    return True


class ClientLine:
    """The waiting requests of one client in one class, by arrival; at least one."""

    __slots__ = ("client", "entry", "n_passes", "preferred", "requests")

    def __init__(self, client: ServedClient) -> None:
        self.client = client
        self.requests: OrderedDict[Request, None] = OrderedDict()
        self.entry: _Entry | None = None  # in the heap; None once the line is empty
        self.preferred: Request | None = None  # the first request, if it did not come first
        self.n_passes = 0  # times that the request that came first was passed over

    def prefer(self, n_cached: Callable[[Request], int]) -> None:
        """Brings the request forward of which most is cached, unless one was brought forward."""
        if self.preferred is not None or self.n_passes == MAX_PASSES or len(self.requests) == 1:
            return
        head = list(islice(self.requests, N_PREFERABLE))
        best = max(head, key=n_cached)  # the first of several
        if best is not head[0]:
            self.preferred = best
            self.requests.move_to_end(best, last=False)

    def remove(self, request: Request) -> None:
        """Forgets a request."""
        if request is self.preferred:
            self.preferred = None
            self.n_passes += 1
        elif self.n_passes and request is self._oldest():
            self.n_passes = 0
        del self.requests[request]

    def _oldest(self) -> Request:
        """Returns the request that came first."""
        requests = iter(self.requests)
        first = next(requests)
        return first if self.preferred is None else next(requests, first)

    def entry_now(self) -> "_Entry":
        client = self.client
        return client.served, client.turn, self._oldest().arrival, self

    def arrival_of(self, request: Request) -> int:
        """Returns the arrival by which a request has its turn: a preferred request has the turn of
        the one that came first."""
        return self._oldest().arrival if request is self.preferred else request.arrival


_Entry = tuple[float, int, int, ClientLine]
"""The counter and the last turn of a line's client, the arrival of its first request, and the
line."""

_Ahead = tuple[float, int, int, int, ClientLine, Iterator[Request], Request | None]
"""An entry with its index in the heap before the line; behind it the requests after the next one,
and the next one, once the line has been looked at."""


_NONE: Iterator[Request] = iter(())


class PriorityClass:
    """The waiting requests of one priority; iterating yields them in any order.

    Lines are in a heap by the service that their clients had when the lines were last looked at.
    Service only grows, so an outdated entry is replaced when it comes to the top. Entries that are
    no longer their line's are dropped when they come to the top, or when there are too many.
    """

    def __init__(self, priority: int, *, since: float) -> None:
        self.priority = priority
        self.since = since
        """Time of the last admission of the class, or from which on it has waited."""
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

    def prefer(self, client: ServedClient, n_cached: Callable[[Request], int]) -> None:
        self._lines[client].prefer(n_cached)

    def least_served(self) -> float:
        """Returns the least counter of the class's clients; there must be one."""
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
        """Yields requests as if each were admitted when the next is asked for, of the clients for
        which `may_begin` is true then. `counters` takes in what these admissions would charge.

        The heap is walked from its top and is not changed: only the entries before the yielded
        requests are looked at.
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
                requests = iter(line.requests)
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
    """Counters and last turns of clients as they would be if some more were admitted."""

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
