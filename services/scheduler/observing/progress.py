"""The observer of progress: it reports each returned iteration, and the number of requests in the
pool. `services/common/serving.py` decides from both whether this scheduler serves."""

from collections.abc import Callable, Sequence

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline


class IterationProgress:
    """An iteration observer of each epoch, which reports progress."""

    def __init__(self, *, on_iteration: Callable[[], None]) -> None:
        self._on_iteration = on_iteration
        self._scheduler: Scheduler | None = None

    @property
    def n_requests(self) -> int:
        """Number of requests in the pool, or 0 without a pipeline."""
        return 0 if self._scheduler is None else len(self._scheduler.pool)

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "IterationProgress":
        """Prepares for the epoch that is about to form. Returns this observer."""
        self._scheduler = scheduler
        return self

    def opened(self) -> None:
        self._on_iteration()

    def sent(self, batch: Batch, scheduler: Scheduler) -> None: ...

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        self._on_iteration()

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None: ...

    def closed(self, loss: str | None) -> None:
        self._scheduler = None
