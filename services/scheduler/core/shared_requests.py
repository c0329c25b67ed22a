"""What the pipelines of one scheduler share: the requests that wait, and the accounts of the pool.

A request belongs to no pipeline until a pipeline admits it, and to none again when it is preempted
or its pipeline is lost. Then it waits at its old place in the order, and any pipeline may admit it.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol

from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.no_control import NoControl
from services.scheduler.core.admission.waiting import Waiting
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.placement import Placement
from services.scheduler.core.request import Request


class PoolView(Protocol):
    """The pool as one pipeline sees it."""

    @property
    def running(self) -> Collection[Request]:
        """The requests that the pipeline has admitted."""
        ...

    @property
    def wake(self) -> Callable[[], None]:
        """A function that makes the pipeline select again."""
        ...


class SharedRequests:
    """The waiting requests of all pipelines, and the counts of the whole pool."""

    def __init__(self, order: Order | None, control: AdmissionControl | NoControl) -> None:
        self.order = FirstComeFirstServed() if order is None else order
        """The waiting requests, and the choice of the next one."""
        self.waiting = Waiting(self.order, control)
        """Deadlines and counts of the waiting requests."""
        self.suspects: dict[Request, None] = {}
        """The waiting requests that may have ended a pipeline."""
        self.grammars: Counter[bytes] = Counter()
        """The number of waiting requests of each grammar, by the grammar's digest."""
        self.placement = Placement()
        """The choice of the pipeline that admits a waiting request."""
        self.pools: list[PoolView] = []
        """The pool as each pipeline sees it."""
        self.n_tokens = 0
        """Number of tokens that the requests in the pool count for together."""
        self.n_arrived = 0
        """Number of requests that have ever come into the pool."""

    def wake_all(self) -> None:
        """Tells all pipelines that a request waits."""
        for pool in self.pools:
            pool.wake()

    def wake_others(self, pool: PoolView) -> None:
        """Tells all pipelines except the one of `pool` that requests wait again."""
        for other in self.pools:
            if other is not pool:
                other.wake()
