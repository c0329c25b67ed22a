"""Creates the observers that turn the work of a scheduler into events, and begins and ends watches.
A watch sends these events to one watcher.

A watch begins with events about the present state: the epoch of each pipeline that serves, each
request in the pool, the order of the pool, and the workers that do not fit. A watch goes on across
epochs, until this scheduler no longer leads or the watcher is too slow.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from orcinus.v1 import watch_pb2

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.pipeline.shortfall import UnfitWorker
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.audience import Audience
from services.scheduler.watching.core_calls import tell_calls
from services.scheduler.watching.decisions import Decisions
from services.scheduler.watching.epoch_events import EpochTeller
from services.scheduler.watching.pool_events import PoolTeller
from services.scheduler.watching.request_events import RequestTeller, turn_of
from services.scheduler.watching.told_requests import ToldRequests
from services.scheduler.watching.watcher import MAX_PENDING_BYTES, Watcher


class Watching:
    """Creates the observers that make the events of one scheduler process, and begins and ends
    watches."""

    def __init__(
        self, settings: SchedulerSettings, *, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._settings = settings
        self._audience = Audience(wall_ns=wall_ns)
        self._told = ToldRequests()
        self._pool = PoolTeller(self._audience, self._told)
        self._epochs: list[EpochTeller] = []  # those that serve, and those that served last
        self._unfit: tuple[UnfitWorker, ...] = ()
        self.decisions = Decisions(self._audience, self._told)
        """Sends watchers the decisions of scheduling cores."""
        self.requests = RequestTeller(
            self._audience,
            self._told,
            pipeline_of=self._pool.pipeline_of,
            note_change=self._pool.note_change,
        )
        """The observer of all requests."""

    @property
    def is_watched(self) -> bool:
        """Whether there is a watcher."""
        return self._audience.is_there

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> EpochTeller:
        """Returns the observer of an epoch that is about to form. From now on watchers also get
        events about the calls of the epoch's core."""
        tell_calls(scheduler, self.decisions, pipeline=pipeline.number)
        return EpochTeller(
            self._audience,
            self._told,
            self._pool,
            settings=self._settings,
            pipeline=pipeline,
            scheduler=scheduler,
            on_open=self._begin,
            n_serving=lambda: len(self._serving()),
        )

    @contextlib.contextmanager
    def watch(
        self, *, has_decisions: bool = False, max_pending_bytes: int = MAX_PENDING_BYTES
    ) -> Iterator[Watcher]:
        """Yields a watcher. It gets the present state, and then all events during the `with`
        block."""
        watcher = Watcher(has_decisions=has_decisions, max_pending_bytes=max_pending_bytes)
        if self._epochs:
            self._tell_all(watcher)
        for worker in self._unfit:
            self._audience.tell(_mark_of(worker), (watcher,))
        self._audience.join(watcher)
        try:
            yield watcher
        finally:
            self._audience.leave(watcher)

    def note_unfit(self, unfit: tuple[UnfitWorker, ...]) -> None:
        """Sends watchers a mark (a note for people) about each worker that does not fit and that
        was not in `unfit` in the last call."""
        before, self._unfit = self._unfit, unfit
        if self._audience.is_there:
            for worker in unfit:
                if worker not in before:
                    self._audience.tell(_mark_of(worker))

    def note_draining(self, epoch: int) -> None:
        """Sends watchers the state of the pipeline of an epoch and a mark (a note for people) that
        it drains, if the pipeline serves."""
        for one in self._serving():
            if one.epoch == epoch and self._audience.is_there:
                one.tell_draining()

    def drain(self) -> None:
        """Sends watchers a mark (a note for people) that the scheduler takes no more requests."""
        if self._audience.is_there:
            text = "the scheduler takes no more requests"
            mark = watch_pb2.MarkEvent(kind=watch_pb2.MARK_KIND_DRAINING, text=text)
            self._audience.tell(watch_pb2.WatchEvent(mark=mark))

    def note_slow_join(self, text: str) -> None:
        """Sends watchers a mark (a note for people) that a pipeline does not form. `text` names the
        stages that have not joined."""
        if self._audience.is_there:
            mark = watch_pb2.MarkEvent(kind=watch_pb2.MARK_KIND_UNFORMED, text=text)
            self._audience.tell(watch_pb2.WatchEvent(mark=mark))

    def end(self, reason: str) -> None:
        """Ends the watch of every watcher, and tells each of them the reason."""
        self._audience.end(reason)

    def _begin(self, epoch: EpochTeller) -> None:
        """Notes that an epoch serves from now on, so that new watchers get its state."""
        self._epochs = [*self._serving(), epoch]

    def _serving(self) -> list[EpochTeller]:
        return [epoch for epoch in self._epochs if epoch.is_serving]

    def _tell_all(self, watcher: Watcher) -> None:
        to = (watcher,)
        for epoch in self._serving() or self._epochs[-1:]:
            self._audience.tell(watch_pb2.WatchEvent(epoch=epoch.event()), to)
        for request in self._pool.requests():
            turn = self.requests.whole(request, turn_of(request))
            self._audience.tell(watch_pb2.WatchEvent(request=turn), to)
        self._audience.tell(watch_pb2.WatchEvent(pool=self._pool.event()), to)


def _mark_of(worker: UnfitWorker) -> watch_pb2.WatchEvent:
    mark = watch_pb2.MarkEvent(kind=watch_pb2.MARK_KIND_UNFIT, text=worker.for_clients)
    return watch_pb2.WatchEvent(mark=mark)
