"""The interface of observers of requests: metrics, traces.

Observers are called from the event loop at the few events of a request's life, never for each
token. Observers never wait and never raise. They exist as long as the process. A request that is
submitted ends or fails exactly once, whatever happens to pipelines.
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
        """Notes that a submission was rejected. Its request has never been in the pool."""

    def admitted(self, request: Request) -> None:
        """Notes that a request is admitted: the iteration that is about to be sent is the request's
        first one, or the first one since the request was suspended or preempted."""

    def first_token(self, request: Request) -> None:
        """Notes that a request has got its first token after an admission. The request may have
        ended with this token."""

    def suspended(self, request: Request) -> None:
        """Notes that a request waits for another pipeline, because its own was lost or is late."""

    def preempted(self, request: Request) -> None:
        """Notes that a request was preempted, because other requests get its memory or its pipeline
        is to end. The request waits to be admitted again."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Notes that a request has finished, was cancelled, or can't be served."""

    def failed(self, request: Request) -> None:
        """Notes that a request ended with the status UNAVAILABLE. The scheduler has lost the lead,
        or the time for draining is over."""


class RequestObservers:
    """Passes each call on to any number of observers, one after the other."""

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
