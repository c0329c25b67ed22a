"""A scheduler in simulated time that learns the cost of iterations as the serving scheduler
does."""

from collections.abc import Sequence

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.pace import PaceOfEpoch


class LearningScheduler:
    """A scheduler, together with an observer that measures its iterations. From the measurements,
    the observer sets the scheduler's estimate of the fixed cost of an iteration, which does not
    depend on the tokens."""

    def __init__(self, scheduler: Scheduler, pace: PaceOfEpoch) -> None:
        self._scheduler = scheduler
        self._pace = pace

    @property
    def n_reserved_slots(self) -> int:
        """Number of K/V slots that requests have reserved."""
        return self._scheduler.n_reserved_slots

    def submit(self, request: Request) -> None:
        """Puts a request into the pool. Raises the errors of `Scheduler.submit`."""
        self._scheduler.submit(request)

    def select(self) -> Batch | None:
        """Returns the next batch to run. Returns None if no request can run or enough batches are
        in flight."""
        batch = self._scheduler.select()
        if batch is not None:
            self._pace.sent(batch, self._scheduler)
        return batch

    def take_preempted(self) -> Sequence[Request]:
        """Returns the requests that were preempted since the last call."""
        return self._scheduler.take_preempted()

    def apply(self, iteration: int, token_ids: Sequence[int]) -> Sequence[Update]:
        """Passes the sampled tokens of the batch number `iteration` to the scheduler, one token for
        each sampled span, in order. Returns the updates of the requests."""
        updates = self._scheduler.apply(iteration, token_ids)
        self._pace.returned(iteration, updates, self._scheduler)
        return updates
