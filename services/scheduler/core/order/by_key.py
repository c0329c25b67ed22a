"""A base class of orders that give each request a number, so that an order is written in a few
lines.

A subclass defines `key`, a number that is computed when a request arrives: the lowest one is
admitted first. Keys that change with time can often be replaced by constant keys. For example, if
the keys of all waiting requests fall at the same rate, their order never changes, so the keys at
one fixed time give the same order.
"""

from abc import abstractmethod
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter

from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request

_place = attrgetter("place")


class OrderByKey(Order):
    """Sorts waiting requests by their keys, and by arrival where keys are equal. Preempted requests
    come first, because they have begun."""

    def __init__(self) -> None:
        self._keyed: list[tuple[float, int, Request]] = []  # sorted
        self._keys: dict[Request, tuple[float, int, Request]] = {}
        self._preempted: list[Request] = []
        self._n_admitted = 0

    @abstractmethod
    def key(self, request: Request) -> float:
        """Returns the key of a request that has arrived. The lowest key is admitted first."""

    def __len__(self) -> int:
        return len(self._keyed) + len(self._preempted)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._preempted, map(itemgetter(2), self._keyed))

    def add(self, request: Request) -> None:
        """Adds a request to the waiting ones, sorted by its key."""
        entry = self._keys[request] = (self.key(request), request.arrival, request)
        insort(self._keyed, entry)

    def restore(self, requests: Sequence[Request]) -> None:
        """Adds preempted requests. They come before all others, in the order of their places."""
        self._preempted = sorted([*self._preempted, *requests], key=_place)

    def admit(self, request: Request) -> None:
        """Removes an admitted request from the waiting ones. A request that was not preempted gets
        the place after all running requests."""
        if request in self._keys:
            self._keyed.remove(self._keys.pop(request))
            request.place = self._n_admitted
            self._n_admitted += 1
        else:
            self._preempted.remove(request)

    def remove(self, request: Request) -> None:
        """Removes a waiting request that ends. Does nothing for a request that runs."""
        if request in self._keys:
            self._keyed.remove(self._keys.pop(request))
        elif request in self._preempted:
            self._preempted.remove(request)

    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the running requests `ready`, then the preempted requests, and then the other
        waiting requests, with the lowest key first. If `waiting` is given, yields the running
        requests, and then exactly the requests in `waiting`."""
        return chain(ready, self if waiting is None else waiting)
