"""All requests that are in the system, in the order in which they arrived.

Waiting and returned requests are kept apart from running ones, so that a selection walks only over
requests it can take: its cost does not depend on how many others there are.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge

from services.common.errors import PoolFull
from services.scheduler.request import Request, RequestState


def _arrival(request: Request) -> int:
    return request.arrival


class RequestPool:
    """Holds every request from its arrival to its end, in exactly one of its states."""

    def __init__(self, *, max_requests: int) -> None:
        self.max_requests = max_requests
        self._n_arrived = 0
        self._waiting: dict[Request, None] = {}  # INITIATION, in arrival order
        self._running: dict[Request, None] = {}  # RUNNING
        self._returned: list[Request] = []  # INCREMENT, in arrival order

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._returned)

    def __iter__(self) -> Iterator[Request]:
        yield from self._waiting
        yield from self._running
        yield from self._returned

    @property
    def n_waiting(self) -> int:
        """Requests that have never run."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Requests that have run, or are running, and have not ended."""
        return len(self._running) + len(self._returned)

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            PoolFull: there are `max_requests` already.
        """
        if len(self) >= self.max_requests:
            raise PoolFull(
                f"the request pool holds its limit of {self.max_requests} requests",
                retry_after_s=1.0,
            )
        request.arrival = self._n_arrived
        self._n_arrived += 1
        self._waiting[request] = None

    def selectable(self) -> Iterator[Request]:
        """Requests that are not running, in arrival order; the pool must not change meanwhile."""
        return merge(self._returned, self._waiting, key=_arrival)

    def mark_running(self, requests: Iterable[Request]) -> None:
        """INITIATION or INCREMENT -> RUNNING, for all requests of a batch at once."""
        for request in requests:
            if request.state is RequestState.INITIATION:
                del self._waiting[request]
            request.state = RequestState.RUNNING
            self._running[request] = None
        self._returned = [r for r in self._returned if r.state is not RequestState.RUNNING]

    def mark_returned(self, request: Request) -> None:
        """RUNNING -> INCREMENT."""
        del self._running[request]
        request.state = RequestState.INCREMENT
        if not self._returned or self._returned[-1].arrival < request.arrival:
            self._returned.append(request)
        else:
            insort(self._returned, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Any state -> FINISHED, and out of the pool."""
        if request.state is RequestState.INITIATION:
            del self._waiting[request]
        elif request.state is RequestState.RUNNING:
            del self._running[request]
        else:
            del self._returned[bisect_left(self._returned, request.arrival, key=_arrival)]
        request.state = RequestState.FINISHED
