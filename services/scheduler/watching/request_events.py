"""Sends watchers an event for each change of a request's state: waiting, admitted, preempted,
suspended, ended."""

from collections.abc import Callable

from orcinus.v1 import scheduler_pb2, watch_pb2

from services.common.errors import OrcinusError
from services.scheduler.core.request import FinishReason, Request, RequestState
from services.scheduler.watching.audience import Audience
from services.scheduler.watching.told_requests import ToldRequests

REASONS = {
    FinishReason.STOP: scheduler_pb2.COMPLETION_REASON_STOP,
    FinishReason.LENGTH: scheduler_pb2.COMPLETION_REASON_LENGTH,
    FinishReason.CANCELLED: scheduler_pb2.COMPLETION_REASON_CANCELLED,
    FinishReason.FAILED: scheduler_pb2.COMPLETION_REASON_FAILED,
    FinishReason.TIMED_OUT: scheduler_pb2.COMPLETION_REASON_TIMED_OUT,
}

_ADMITTED = watch_pb2.REQUEST_TURN_ADMITTED


class RequestTeller:
    """A request observer that sends watchers an event for each change of a request."""

    def __init__(
        self,
        audience: Audience,
        told: ToldRequests,
        *,
        pipeline_of: Callable[[Request], int],
        note_change: Callable[[], None],
    ) -> None:
        """`pipeline_of` returns the number of the pipeline that runs a request. `note_change` is
        called when the pool has changed."""
        self._audience = audience
        self._told = told
        self._pipeline_of = pipeline_of
        self._note_change = note_change

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None:
        """Sends the event that a request waits."""
        if self._audience.is_there:
            self._tell(self.whole(request, watch_pb2.REQUEST_TURN_WAITING))

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None:
        """Sends nothing, because a rejected request has no number."""

    def admitted(self, request: Request) -> None:
        """Sends the event that a request runs, with the number of its pipeline and the number of
        its tokens that were cached."""
        if self._audience.is_there:
            event = self._change(request, watch_pb2.REQUEST_TURN_ADMITTED)
            event.n_cached_tokens = request.n_cached_tokens
            self._tell(event)

    def first_token(self, request: Request) -> None:
        """Sends nothing, because the event of an iteration tells how many tokens are new."""

    def suspended(self, request: Request) -> None:
        """Sends the event that a request is suspended, because its pipeline was lost or is late."""
        self._tell_put_down(request, watch_pb2.REQUEST_TURN_SUSPENDED)

    def preempted(self, request: Request) -> None:
        """Sends the event that a request was preempted."""
        self._tell_put_down(request, watch_pb2.REQUEST_TURN_PUT_DOWN)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Sends the event that a request has ended, with the reason."""
        self._end(request, REASONS[reason])

    def failed(self, request: Request) -> None:
        """Sends the event that a request ended with the status UNAVAILABLE."""
        self._end(request, scheduler_pb2.COMPLETION_REASON_UNAVAILABLE)

    def whole(self, request: Request, turn: watch_pb2.RequestTurn) -> watch_pb2.RequestEvent:
        """Returns an event with all fields of a request. `turn` is the change of the request's
        state."""
        event = self._change(request, turn)
        event.request_id = request.request_id
        event.n_prompt_tokens = request.n_prompt_tokens
        event.max_new_tokens = request.max_new_tokens
        event.n_cached_tokens = request.n_cached_tokens
        event.priority = request.priority
        if request.account is not None:
            event.account = request.account.name
        return event

    def _tell_put_down(self, request: Request, turn: watch_pb2.RequestTurn) -> None:
        if (told := self._told.get(request)) is not None:
            told.put_down()
        if self._audience.is_there:
            self._tell(self._change(request, turn))

    def _end(self, request: Request, reason: scheduler_pb2.CompletionReason) -> None:
        if self._audience.is_there:
            event = self._change(request, watch_pb2.REQUEST_TURN_ENDED)
            event.reason = reason
            self._tell(event)
        self._told.forget(request)

    def _change(self, request: Request, turn: watch_pb2.RequestTurn) -> watch_pb2.RequestEvent:
        return watch_pb2.RequestEvent(
            number=self._told.number(request),
            turn=turn,
            n_generated_tokens=len(request.generated_token_ids),
            pipeline=self._pipeline_of(request) if turn == _ADMITTED else 0,
        )

    def _tell(self, event: watch_pb2.RequestEvent) -> None:
        self._audience.tell(watch_pb2.WatchEvent(request=event))
        self._note_change()


def turn_of(request: Request) -> watch_pb2.RequestTurn:
    """Returns the change of state (turn) that led to the present state of a request in the pool."""
    if request.state is not RequestState.INITIATION:
        return watch_pb2.REQUEST_TURN_ADMITTED
    if request.n_preemptions:
        return watch_pb2.REQUEST_TURN_PUT_DOWN
    if request.n_losses or request.generated_token_ids:
        return watch_pb2.REQUEST_TURN_SUSPENDED
    return watch_pb2.REQUEST_TURN_WAITING
