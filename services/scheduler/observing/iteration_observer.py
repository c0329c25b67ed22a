"""The interface of observers of iterations: metrics, traces, watches.

Observers are called from the event loop between two steps of serving, so they take O(batch) time at
most, never wait and never raise. An observer lives as long as one epoch, like the iteration
numbers.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline


class IterationObserver(Protocol):
    """An observer of one epoch, from the first iteration to the last."""

    def opened(self) -> None:
        """Notes that the pipeline has formed; iterations may come."""

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        """Notes that a batch is about to be sent; `scheduler` is as the selection left it."""

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        """Notes that a batch has come back and has been applied, which brought `updates`."""

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        """Notes how a stage spent an iteration; before the iteration has returned, or after."""

    def closed(self, loss: str | None) -> None:
        """Notes the end of the epoch. `loss` says why the pipeline was lost, or why it never
        formed; None if it was drained."""


ObserveEpoch = Callable[[Pipeline, Scheduler], IterationObserver]
"""A function that makes the observer of an epoch that is about to form."""


class IterationObservers:
    """Several observers as one, told in turn."""

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

    def closed(self, loss: str | None) -> None:
        for observer in self._observers:
            observer.closed(loss)
