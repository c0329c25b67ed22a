"""The observer of progress: it reports each returned iteration, and the number of requests in the
pool. `services/common/serving.py` decides from both whether this scheduler serves."""

from collections.abc import Callable, Sequence
from functools import partial

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline


class IterationProgress:
    """Makes an iteration observer for each epoch, and knows the number of requests in the pool."""

    def __init__(self, *, on_iteration: Callable[[], None]) -> None:
        self._on_iteration = on_iteration
        self._schedulers: list[Scheduler] = []  # of the epochs that join or serve

    @property
    def n_requests(self) -> int:
        """Number of requests in the pool, or 0 without a pipeline."""
        return len(self._schedulers[0].pool) if self._schedulers else 0

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "ProgressOfEpoch":
        """Returns the observer of an epoch that is about to form."""
        self._schedulers.append(scheduler)
        return ProgressOfEpoch(self._on_iteration, partial(self._schedulers.remove, scheduler))


class ProgressOfEpoch:
    """An iteration observer of one epoch, which reports progress."""

    def __init__(self, on_iteration: Callable[[], None], on_close: Callable[[], None]) -> None:
        self._on_iteration = on_iteration
        self._on_close = on_close

    def opened(self) -> None:
        self._on_iteration()

    def sent(self, batch: Batch, scheduler: Scheduler) -> None: ...

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        self._on_iteration()

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None: ...

    def late(self, reason: str, moved: Sequence[Request]) -> None: ...

    def closed(self, loss: str | None) -> None:
        self._on_close()
