"""The observer of progress: it reports each returned iteration, and the number of requests in the
pool. `services/common/serving.py` decides from both whether this scheduler serves."""

from collections.abc import Callable, Sequence

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline


class IterationProgress:
    """Makes an observer of each epoch, which reports progress."""

    def __init__(self, *, on_iteration: Callable[[], None]) -> None:
        self._on_iteration = on_iteration
        self._observed: set[_ProgressOfEpoch] = set()

    @property
    def n_requests(self) -> int:
        """Number of requests in the pool, or 0 without a pipeline."""
        return max((len(epoch.pool) for epoch in self._observed), default=0)

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "_ProgressOfEpoch":
        """Returns the observer of an epoch that is about to form."""
        epoch = _ProgressOfEpoch(scheduler.pool, self._on_iteration, self._observed.discard)
        self._observed.add(epoch)
        return epoch


class _ProgressOfEpoch:
    """An iteration observer of one epoch. All pipelines have their requests from one pool."""

    def __init__(
        self,
        pool: RequestPool,
        on_iteration: Callable[[], None],
        on_end: Callable[["_ProgressOfEpoch"], None],
    ) -> None:
        self.pool = pool
        self._on_iteration = on_iteration
        self._on_end = on_end

    def opened(self) -> None:
        self._on_iteration()

    def sent(self, batch: Batch, scheduler: Scheduler) -> None: ...

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        self._on_iteration()

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None: ...

    def closed(self, loss: str | None) -> None:
        self._on_end(self)
