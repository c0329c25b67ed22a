"""Records of the waiting requests: their number, their deadlines and their work."""

from heapq import heapify, heappop, heappush

from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.no_control import NoControl
from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request, RequestState

PRIORITY_KINDS = ("raised", "normal", "lowered")
"""Names of the kinds of priorities: below 0, equal to 0, and above 0."""


class Waiting:
    """Counts the waiting requests of an order, and finds the requests that have waited too long."""

    def __init__(self, order: Order, control: AdmissionControl | NoControl) -> None:
        """`order` holds the waiting requests. `control` is notified of each request that starts or
        stops waiting."""
        self._order = order
        self._control = control
        self._n_of_kind = [0] * len(PRIORITY_KINDS)
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; some may have ended

    def n_of(self, kind: str) -> int:
        """Returns the number of waiting requests whose priority is of the kind `kind`, one of
        `PRIORITY_KINDS`."""
        return self._n_of_kind[PRIORITY_KINDS.index(kind)]

    def add(self, request: Request, *, has_begun: bool = False) -> None:
        """Notes that a request waits. `has_begun` says that the request has run before."""
        self._control.note_waiting(request, has_begun=has_begun)
        self._n_of_kind[_kind_of(request)] += 1
        if request.deadline is None:
            return
        heappush(self._deadlines, (request.deadline, request.arrival, request))
        if len(self._deadlines) > 2 * len(self._order) + 64:  # most belong to ended requests
            self._deadlines = [
                (one.deadline, one.arrival, one) for one in self._order if one.deadline is not None
            ]
            heapify(self._deadlines)

    def remove(self, request: Request) -> None:
        """Notes that a request waits no longer."""
        self._control.note_not_waiting(request)
        self._n_of_kind[_kind_of(request)] -= 1

    def expired(self, now: float) -> list[Request]:
        """Returns the waiting requests whose deadlines have passed, or will pass before the
        requests can begin."""
        result: dict[Request, None] = {}  # a preempted request is in the heap more than once
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]
            if request.state is RequestState.INITIATION:
                result[request] = None
        if self._deadlines:
            hopeless = self._control.hopeless(now, self._deadlines[0][0], self._order)
            result.update(dict.fromkeys(hopeless))
        return list(result)


def _kind_of(request: Request) -> int:
    return 1 + (request.priority > 0) - (request.priority < 0)
