"""The interface of observers of iterations: metrics, traces, events for watchers.

Observers are called from the event loop between two steps of serving. So an observer takes O(batch)
time at most, never waits and never raises. An observer exists for one epoch, in which iterations
are numbered from the start.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline


class IterationObserver(Protocol):
    """An observer of one epoch, from the first iteration to the last."""

    def opened(self) -> None:
        """Notes that all stages have joined the pipeline's epoch. From now on, iterations may be
        sent."""

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        """Notes that a batch is about to be sent. `scheduler` is in its state after the selection
        of the batch."""

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        """Notes that an iteration has returned and that its result has been applied. `updates` are
        the resulting updates of requests."""

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        """Notes the times that a stage spent on an iteration. The call may come before the
        iteration has returned, or after."""

    def late(self, reason: str, moved: Sequence[Request]) -> None:
        """Notes that an iteration is suspiciously late, and that the requests `moved` wait for
        other pipelines. The pipeline goes on if the iteration returns."""

    def closed(self, loss: str | None) -> None:
        """Notes the end of the epoch. `loss` is the reason why the pipeline was lost or never
        formed, or None if this scheduler ended the pipeline itself."""


ObserveEpoch = Callable[[Pipeline, Scheduler], IterationObserver]
"""A function that makes the observer of an epoch that is about to form."""


class IterationObservers:
    """Passes each call on to several observers, one after the other."""

    def __init__(self, *observers: IterationObserver) -> None:
        self._observers = observers

    def opened(self) -> None:
        for observer in self._observers:
            observer.opened()

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        for observer in self._observers:
            observer.sent(batch, scheduler)

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        for observer in self._observers:
            observer.returned(iteration, updates, scheduler)

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        for observer in self._observers:
            observer.timed(stage_index, timing)

    def late(self, reason: str, moved: Sequence[Request]) -> None:
        for observer in self._observers:
            observer.late(reason, moved)

    def closed(self, loss: str | None) -> None:
        for observer in self._observers:
            observer.closed(loss)
