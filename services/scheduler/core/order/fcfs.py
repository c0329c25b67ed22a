"""First come, first served: the order of the paper (Algorithm 1, line 20)."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import ClassVar, Self

from services.scheduler.core.order.order import Clock, OrderOptions
from services.scheduler.core.request import Request


class FirstComeFirstServed:
    """Requests by arrival, whichever client they are of."""

    name: ClassVar[str] = "fcfs"
    heeds_clients: ClassVar[bool] = False
    options = OrderOptions()

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}  # by arrival

    @classmethod
    def of(cls, options: OrderOptions, now: Clock) -> Self:
        """Returns an order without requests."""
        return cls()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Puts a request at the end."""
        request.place = request.arrival
        self._waiting[request] = None

    def restore(self, requests: Sequence[Request]) -> None:
        """Puts requests back to where they were in the order of arrival."""
        self._waiting = dict.fromkeys(sorted([*self._waiting, *requests], key=_place))

    def admit(self, request: Request) -> None:
        """Lets go of a request; its place is the one that it had."""
        del self._waiting[request]

    def remove(self, request: Request) -> None:
        """Forgets a request."""
        self._waiting.pop(request, None)

    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the requests that run, and then the others, each by arrival. That is one order,
        unless a loss or a grammar kept a request waiting that came before some that run: if it came
        before them here and there were no memory for it, they could not go on to free theirs."""
        return chain(ready, self._waiting if waiting is None else waiting)

    def batch_limits(self, running: Collection[Request], ready: Sequence[Request]) -> None:
        """Limits no request."""

    def rank(self, request: Request) -> tuple[int, ...]:
        """Returns its place: the request that arrived last is preempted first."""
        return (request.place,)


def _place(request: Request) -> int:
    return request.place
