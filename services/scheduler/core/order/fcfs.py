"""First come, first served: the order of the paper (Algorithm 1, line 20)."""

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import ClassVar

from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request


class FirstComeFirstServed(Order):
    """The order of arrival. Clients and priorities do not matter."""

    name: ClassVar[str] = "fcfs"

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}  # by arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Adds a request at the end of the order."""
        request.place = request.arrival
        self._waiting[request] = None

    def restore(self, requests: Sequence[Request]) -> None:
        """Puts preempted requests back among the waiting ones, sorted by arrival."""
        self._waiting = dict.fromkeys(sorted([*self._waiting, *requests], key=attrgetter("place")))

    def admit(self, request: Request) -> None:
        """Removes an admitted request from the waiting ones. The request keeps its place."""
        del self._waiting[request]

    def remove(self, request: Request) -> None:
        """Removes a waiting request that ends. Does nothing for a request that runs."""
        self._waiting.pop(request, None)

    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the running requests by arrival, and then the waiting ones by arrival.

        After a loss, or because of a grammar, a waiting request may have arrived before running
        ones. It still comes after them: if it came first and there were no memory for it, the
        running requests could not continue and free their memory.
        """
        return chain(ready, self._waiting if waiting is None else waiting)
