"""Sends watchers the events of one epoch: its pipeline serves, iterations run, and the pipeline is
lost or ends without being lost. Several epochs may serve at the same time, each on a pipeline of
its own."""

from collections.abc import Callable, Collection, Sequence

from orcinus.v1 import watch_pb2, worker_pb2

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.audience import Audience
from services.scheduler.watching.iteration_events import IterationTeller
from services.scheduler.watching.pool_events import PoolTeller
from services.scheduler.watching.told_requests import ToldRequests


class EpochTeller:
    """An iteration observer that sends watchers the events of one epoch."""

    def __init__(
        self,
        audience: Audience,
        told: ToldRequests,
        pool: PoolTeller,
        *,
        settings: SchedulerSettings,
        pipeline: Pipeline,
        scheduler: Scheduler,
        on_open: Callable[["EpochTeller"], None],
        n_serving: Callable[[], int],
    ) -> None:
        """`on_open` is called when the pipeline serves. `n_serving` returns the number of epochs
        that serve."""
        self.is_serving = False
        """Whether the pipeline serves."""
        self._on_open = on_open
        self._n_serving = n_serving
        self._audience = audience
        self._told = told
        self._pool = pool
        self._settings = settings
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._iterations = IterationTeller(
            audience,
            told,
            epoch=pipeline.epoch,
            pipeline=pipeline.number,
            n_stages=pipeline.n_stages,
        )

    @property
    def pipeline(self) -> int:
        """The number of the pipeline."""
        return self._pipeline.number

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._pipeline.epoch

    def tell_draining(self) -> None:
        """Sends watchers the state of the pipeline, and a mark (a note for people) that it
        drains."""
        self._audience.tell(watch_pb2.WatchEvent(epoch=self.event()))
        self.mark(watch_pb2.MARK_KIND_DRAINING, "a worker is leaving; requests go to others")

    def opened(self) -> None:
        """Sends the event that the pipeline serves. If requests may have caused the loss of an
        earlier pipeline, also sends a mark (a note for people) that lists them."""
        self.is_serving = True
        self._on_open(self)
        self._pool.add(self.pipeline, self._scheduler.pool)
        if not self._audience.is_there:
            return
        self._audience.tell(watch_pb2.WatchEvent(epoch=self.event()))
        suspects = [request for request in self._scheduler.pool if request.is_suspect]
        if suspects:
            self.mark(
                watch_pb2.MARK_KIND_SUSPECTS,
                "were in flight in a pipeline that was lost, and are admitted one at a time",
                suspects,
            )
        self._pool.note_change()

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        """Begins the event of an iteration that is about to be sent."""
        self._iterations.sent(batch, scheduler)
        self._pool.note_change()

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        """Completes the event of an iteration with the updates of its requests. Called when the
        iteration has returned."""
        self._iterations.returned(iteration, updates)
        self._pool.note_change()

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        """Adds to the event of an iteration the times that a stage spent on the iteration."""
        self._iterations.timed(stage_index, timing)

    def late(self, reason: str, moved: Sequence[Request]) -> None:
        """Sends watchers a mark (a note for people) that an iteration is late and that the requests
        `moved` wait for other pipelines."""
        if self._audience.is_there:
            self.mark(watch_pb2.MARK_KIND_LATE, f"{reason}, its requests go on elsewhere", moved)

    def closed(self, loss: str | None) -> None:
        """Sends a mark (a note for people) that the pipeline was lost or, if `loss` is None, that
        it has ended without being lost. Sends nothing if the pipeline has never served, or if it
        ends because the scheduler stops."""
        has_served, self.is_serving = self.is_serving, False
        if not has_served or not self._audience.is_there:
            return
        if loss is not None:
            # The text after the first colon comes from other processes and may contain addresses.
            text = loss.partition(":")[0]
            self.mark(watch_pb2.MARK_KIND_LOST, text, self._scheduler.pool.running)
        elif self._n_serving():
            self.mark(watch_pb2.MARK_KIND_LEFT, "the others go on")
        elif self._scheduler.is_draining:
            self.mark(watch_pb2.MARK_KIND_LEFT, "another one is about to form")

    def mark(
        self,
        kind: watch_pb2.MarkKind,
        text: str,
        requests: Collection[Request] = (),
    ) -> None:
        """Sends a mark: a note for people about something that happens now, with the requests that
        it concerns."""
        numbers = [self._told.number(request) for request in requests]
        epoch = self._pipeline.epoch
        mark = watch_pb2.MarkEvent(kind=kind, epoch=epoch, text=text, numbers=numbers)
        self._audience.tell(watch_pb2.WatchEvent(mark=mark))

    def event(self) -> watch_pb2.EpochEvent:
        """Returns the event that describes the pipeline and the settings of its scheduling."""
        pipeline, scheduler, settings = self._pipeline, self._scheduler, self._settings
        policy, kv_manager = scheduler.policy, scheduler.kv_manager
        return watch_pb2.EpochEvent(
            epoch=pipeline.epoch,
            model=pipeline.first.model,
            n_stages=pipeline.n_stages,
            tp_size=pipeline.first.tp_size,
            n_slots=kv_manager.n_slots,
            block_size=kv_manager.block_size,
            max_batch_size=policy.max_batch_size,
            max_batch_tokens=policy.max_tokens or 0,
            pipeline_depth=scheduler.pipeline_depth,
            policy=policy.name,
            order=settings.order,
            admission=settings.admission,
            max_requests=scheduler.pool.max_requests,
            pipeline=pipeline.number,
            is_draining=scheduler.is_draining,
        )
