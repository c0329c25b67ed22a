"""Submits the answers of one call to the scheduler.

A few answers are submitted at a time; whenever the scheduler has ended one, the next follows. If
one of the first answers is not accepted, the client's call is refused. After that, the call counts
as accepted: if a later answer cannot be submitted, the attempt is repeated for up to `resume_s`
seconds.
"""

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Protocol

from orcinus.v1 import scheduler_pb2

from services.frontend.generation.call_resources import CallResources
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.link.scheduler_events import Event, Failed
from services.frontend.link.submitted_request import EventSink
from services.frontend.observing.request_span import RequestSpan


class SubmittedCall(Protocol):
    """The call whose answers `Submissions` submits."""

    def submission(self, index: int) -> scheduler_pb2.Submission:
        """Returns the message that submits an answer."""

    def inbox(self, index: int) -> EventSink:
        """Returns the receiver of the events of a submitted answer."""


class Submissions:
    """Submits the answers of a call. At the end of the call, cancels the answers that still run."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        call: SubmittedCall,
        *,
        model: str,
        resources: CallResources,
        was_held: bool,
        span: RequestSpan,
    ) -> None:
        self._scheduler = scheduler
        self._call: SubmittedCall | None = call  # None once it is closed
        self._model = model
        self._resources = resources
        self._was_held = was_held
        self._span = span
        self.deadline: float | None = None
        """Time, by the event loop's clock, after which the scheduler may drop answers that still
        wait to be started."""
        self._waiting: deque[int] = deque()
        """Indices of the answers that are not submitted yet."""
        self.at_scheduler: set[str] = set()
        """Names of the answers that the scheduler has, or that wait in this process until a
        scheduler can take them."""
        self._unaccepted: set[str] = set()
        """Names of the first answers that the scheduler has not accepted yet. `start` waits until
        there are none."""
        self._started: asyncio.Future[None] | None = None

    async def start(self, indices: Collection[int], *, until: float) -> None:
        """Submits the first answers and waits until the scheduler has accepted them. An answer may
        wait for a pipeline until `until`, a time of the event loop's clock.

        Raises:
            OrcinusError: the reason why an answer was not accepted.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._waiting.extend(indices)
        self._submit_next(until=until)
        if indices:
            await self._started

    def note_arrival(self, event: Event) -> None:
        """Notes that an event of an answer has arrived. The event may make `start` return or raise,
        or cause the next answers to be submitted."""
        if isinstance(event, Failed):
            self._waiting.clear()  # the call ends when its reader gets the error
            if event.request_id in self._unaccepted:
                self.fail_start(event.error)
        self._unaccepted.discard(event.request_id)
        if event.is_last:
            self._end(event.request_id)
        if not self._unaccepted and self._started is not None and not self._started.done():
            self._started.set_result(None)

    def fail_start(self, error: Exception) -> None:
        """Makes `start` raise the error, if `start` is still waiting."""
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    def cut_off(self, request_id: str) -> None:
        """Cancels an answer at the scheduler and submits the next answer."""
        self._scheduler.cancel(request_id)
        self._end(request_id)

    def withdraw(self) -> None:
        """Cancels all answers that the scheduler has, and submits no further answers."""
        self._waiting.clear()
        for request_id in self.at_scheduler:
            self._scheduler.cancel(request_id)
        self.at_scheduler.clear()
        self._resources.in_flight.close()

    def close(self) -> None:
        """Withdraws all answers, and drops the reference to the call, because the call refers to
        this object: a cycle of references would keep the memory of both until the garbage collector
        runs."""
        self.withdraw()
        self._call = None

    def _end(self, request_id: str) -> None:
        if request_id in self.at_scheduler:
            self.at_scheduler.remove(request_id)
            self._resources.in_flight.end(1)
            self._submit_next(until=None)

    def _submit_next(self, *, until: float | None) -> None:
        """Submits answers until the scheduler has as many of this call as it may have at a time.
        `until` is a time for the first answers, which `start` waits for, and None for later
        answers."""
        call = self._call
        while (
            call is not None
            and self._waiting
            and len(self.at_scheduler) < self._resources.max_at_once
        ):
            index = self._waiting.popleft()
            submission = call.submission(index)
            self.at_scheduler.add(submission.request_id)
            if until is not None:
                self._unaccepted.add(submission.request_id)
            self._scheduler.submit(
                submission,
                call.inbox(index),
                model=self._model,
                until=until,
                deadline=self.deadline,
                was_held=self._was_held or until is None,
                span=self._span,
            )
