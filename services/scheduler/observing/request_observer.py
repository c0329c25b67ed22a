"""The interface of observers of requests: metrics, traces.

Observers are called from the event loop, at the few turns of a request's life and never per token.
They never wait and never raise, and live as long as the process: a request that is submitted ends
or fails exactly once, whatever happens to the pipeline.
"""

from typing import Protocol

from orcinus.v1 import scheduler_pb2

from services.common.errors import OrcinusError
from services.scheduler.core.request import FinishReason, Request


class RequestObserver(Protocol):
    """An observer of all requests of one scheduler."""

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None:
        """Notes that a request is in the pool."""

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None:
        """Notes that a request never came into the pool."""

    def admitted(self, request: Request) -> None:
        """Notes that a request rides its first iteration, or the first one since it was suspended,
        which is about to be sent."""

    def first_token(self, request: Request) -> None:
        """Notes that a request has its first token since it was admitted; it may have ended with
        it."""

    def suspended(self, request: Request) -> None:
        """Notes that a request waits again since the pipeline was lost, for the next pipeline."""

    def preempted(self, request: Request) -> None:
        """Notes that a request gave up its memory to others, and waits to be admitted again."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Notes that a request has finished, was cancelled, or can't be served."""

    def failed(self, request: Request) -> None:
        """Notes that a request ended as UNAVAILABLE: the leadership or the time to drain was
        over."""


class RequestObservers:
    """Several observers as one, or none; each is told in turn."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None:
        for observer in self._observers:
            observer.submitted(request, submission)

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None:
        for observer in self._observers:
            observer.rejected(submission, error)

    def admitted(self, request: Request) -> None:
        for observer in self._observers:
            observer.admitted(request)

    def first_token(self, request: Request) -> None:
        for observer in self._observers:
            observer.first_token(request)

    def suspended(self, request: Request) -> None:
        for observer in self._observers:
            observer.suspended(request)

    def preempted(self, request: Request) -> None:
        for observer in self._observers:
            observer.preempted(request)

    def ended(self, request: Request, reason: FinishReason) -> None:
        for observer in self._observers:
            observer.ended(request, reason)

    def failed(self, request: Request) -> None:
        for observer in self._observers:
            observer.failed(request)
