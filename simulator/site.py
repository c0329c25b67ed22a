"""A site: the schedulers of one simulation, and the rule by which a request gets to one of them or
to a pool that they share."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool


class Scheduling(Protocol):
    """The methods of a `Scheduler` that the engine calls; schedulers of baselines have these
    methods, too."""

    @property
    def n_reserved_slots(self) -> int:
        """Number of K/V slots that requests have reserved."""

    def submit(self, request: Request) -> None:
        """Puts a request into the pool."""

    def select(self) -> Batch | None:
        """Returns the next batch to run; None if no request can run or enough batches are in
        flight."""

    def take_preempted(self) -> Sequence[Request]:
        """Returns the requests that were preempted since the last call."""

    def apply(self, iteration: int, token_ids: Sequence[int]) -> Sequence[Update]:
        """Applies the tokens of a batch, one for each sampled span in order. Returns the resulting
        updates."""


@runtime_checkable
class Site(Protocol):
    """Schedulers side by side, each with a pipeline of its own. They may share a pool."""

    woken: dict[int, None]
    """Indices of the schedulers that may have another batch to send, first come, first served. The
    simulation removes an index when it calls `select` of the scheduler."""

    @property
    def schedulers(self) -> Sequence[Scheduling]:
        """The schedulers, each with a pipeline of its own."""

    def submit(self, request: Request) -> None:
        """Puts a request into a pool, and wakes the schedulers that may run it."""


class Alone:
    """A site of one scheduler."""

    def __init__(self, scheduler: Scheduling) -> None:
        self.schedulers = (scheduler,)
        self.woken: dict[int, None] = {}

    def submit(self, request: Request) -> None:
        """Submits a request to the scheduler."""
        self.schedulers[0].submit(request)
        self.woken[0] = None


class OnePool:
    """A site of schedulers that share one pool."""

    def __init__(self, schedulers: Sequence[Scheduling], pools: Sequence[RequestPool]) -> None:
        """`pools` has the view of the pool for each scheduler."""
        self.schedulers = tuple(schedulers)
        self.woken: dict[int, None] = {}
        for index, pool in enumerate(pools):
            pool.wake = partial(self._wake, index)

    def submit(self, request: Request) -> None:
        """Puts a request into the pool, which wakes the schedulers."""
        self.schedulers[0].submit(request)

    def _wake(self, index: int) -> None:
        self.woken[index] = None
