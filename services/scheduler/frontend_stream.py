"""The scheduler's side of a connected frontend: its requests, and the messages that wait for it.

All updates of an iteration for a frontend leave as one message, together with the acceptances of
requests since the last message. The bytes that wait for a slow frontend are bounded.
`SchedulerService` serves the stream, and ends it when too many bytes wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from orcinus.v1 import scheduler_pb2

from services.common.adapter_list import AdapterEntry
from services.common.adapter_list_proto import to_proto
from services.common.errors import InvalidRequest, OrcinusError, PoolFull
from services.scheduler.adapter_commands import Answer
from services.scheduler.core.admission.admission_control import TooLate
from services.scheduler.core.batch import Update
from services.scheduler.core.clients.accounts import KeyInFlight, KeyRate
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.span_logprobs import SpanLogprobs
from services.scheduler.settings import FRONTEND_BYTES
from services.scheduler.token_columns import NewTokens

UPDATE_BYTES = 208
"""Number of bytes that are counted for an update without its log-probabilities: 155 bytes in the
message, and a copy while the message is sent."""

COLUMN_BYTES = 32
"""Number of bytes counted for a token in the columns of a message: 12 bytes, and copies while the
message is sent. At 10,000 tokens per second, a frontend may stop reading for longer than its own
watchdog allows before the scheduler cuts it off."""

ACCEPTANCE_S = 0.05
"""Largest number of seconds for which the acceptance of a request waits, so that the acceptance
leaves in one message with the tokens of an iteration. A separate message would cost as much as some
thirty tokens. The wait delays no token, because the request has no tokens before an iteration
returns."""

MAX_LOGPROB_BYTES = 2**20
"""Bytes of log-probabilities in a message after which another message begins; gRPC accepts messages
four times as large."""

_REASONS = {
    FinishReason.STOP: scheduler_pb2.COMPLETION_REASON_STOP,
    FinishReason.LENGTH: scheduler_pb2.COMPLETION_REASON_LENGTH,
    FinishReason.CANCELLED: scheduler_pb2.COMPLETION_REASON_CANCELLED,
    FinishReason.FAILED: scheduler_pb2.COMPLETION_REASON_FAILED,
    FinishReason.TIMED_OUT: scheduler_pb2.COMPLETION_REASON_TIMED_OUT,
}


class FrontendStream:
    """Keeps the requests of a connected frontend, and the messages that wait to be sent to it."""

    def __init__(self, n_free: Callable[[], int | None] = lambda: None) -> None:
        """`n_free` returns the number of free places in the pool, or None while no requests are
        accepted."""
        self._n_free = n_free
        self._is_told_full = False
        self.requests: dict[str, Request] = {}
        self.n_held = 0
        """Number of requests that the frontend holds while the model is asleep or starts."""
        self._numbers: dict[Request, int] = {}  # numbers that name requests in the columns
        self._with_traits: set[Request] = set()  # requests whose traits the frontend wants
        self.is_overfull = asyncio.Event()
        """Set once too many bytes wait to be sent."""
        self._outbox = scheduler_pb2.ConnectResponse()
        self._columns = NewTokens()  # new tokens in the outbox
        # Messages that leave before the outbox, with their bytes.
        self._sealed: deque[tuple[scheduler_pb2.ConnectResponse, int]] = deque()
        self._n_logprob_bytes = 0  # in the outbox
        self._n_outbox_bytes = 0
        self._n_leaving_bytes = 0  # size of the message that was returned last
        self._n_unsent_bytes = 0  # size of the leaving message, the sealed messages and the outbox
        self._has_mail = asyncio.Event()
        self._is_ending = False
        self._acceptance_timer: asyncio.TimerHandle | None = None  # while there is no other mail

    @property
    def has_ended(self) -> bool:
        """Whether the stream must end and its last message has been taken."""
        return self._is_ending and not self._has_mail.is_set()

    async def next_message(self, *, not_before: float = 0.0) -> scheduler_pb2.ConnectResponse:
        """Waits until there is something to send, and until the time `not_before` of the event
        loop. Returns the next message. Call it only when the previous message has been sent."""
        self._n_unsent_bytes -= self._n_leaving_bytes
        self._n_leaving_bytes = 0
        await self._has_mail.wait()
        pause_s = not_before - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        if self._sealed:
            message, self._n_leaving_bytes = self._sealed.popleft()
            return message
        self._has_mail.clear()
        self._n_leaving_bytes = self._n_outbox_bytes
        message = self._take_outbox()
        n_free = self._n_free()
        if n_free is not None:
            message.n_free = n_free
        self._is_told_full = n_free == 0
        return message

    def check_unsent(self) -> None:
        """Sets `is_overfull` if more than `FRONTEND_BYTES` wait to be sent. Call it before the
        updates of an iteration are added, not after: the updates of a single iteration never count
        as too many."""
        if self._n_unsent_bytes > FRONTEND_BYTES:
            self.is_overfull.set()

    def note_room(self) -> None:
        """Sends the number of free places in the pool, if the last message to the frontend said
        that the pool was full."""
        if self._is_told_full:
            self._has_mail.set()

    def open(self, pipeline: scheduler_pb2.PipelineDescription) -> None:
        """Sends the frontend the description of the pipeline, so that it submits requests from now
        on."""
        self._outbox.pipeline.CopyFrom(pipeline)
        self._outbox.ClearField("sleep")
        self._outbox.is_closed = False
        self.n_held = 0
        self._note_update()

    def close(self) -> None:
        """Reports to the frontend that no more requests are accepted, in a message of its own after
        all earlier messages."""
        if self._has_mail.is_set() or self._acceptance_timer is not None:
            self._seal()
        self._outbox.ClearField("pipeline")
        self._outbox.is_closed = True
        self._note_update()

    def note_shortfall(self, text: str) -> None:
        """Sends the frontend the reason why there is no pipeline."""
        self._outbox.shortfall = text
        self._note_update(text)

    def note_sleep(self, sleep: scheduler_pb2.Sleep) -> None:
        """Sends the frontend the state of the model: asleep or starting."""
        self._outbox.sleep.CopyFrom(sleep)
        self._note_update()

    def note_adapters(self, entries: Iterable[AdapterEntry]) -> None:
        """Sends the frontend entries of the list of loaded adapters."""
        message = to_proto(entries)
        self._outbox.adapters.MergeFrom(message)
        self._note_bytes(message.ByteSize())
        self._has_mail.set()

    def answer(self, command_id: str, answer: Answer) -> None:
        """Sends the frontend the answer to a command about adapters."""
        self._outbox.adapter_answers.add(
            command_id=command_id,
            outcome=answer.outcome,
            message=answer.message,
            field=answer.field,
        )
        self._note_update(answer.message)

    def accept(
        self, request: Request, number: int | None = None, *, wants_traits: bool = False
    ) -> None:
        """Adds a request, and reports to the frontend that the request is accepted. `number`, if
        given, is a short name that the frontend has chosen for the request. Messages then name the
        request by this number in their lists of new tokens. `wants_traits` says whether the
        frontend asks for the traits (`pipeline/fit.py`) of the workers that make the tokens."""
        self.requests[request.request_id] = request
        if wants_traits:
            self._with_traits.add(request)
        if number is not None:
            self._numbers[request] = number
        self._outbox.accepted.add(request_id=request.request_id)
        self._note_bytes(UPDATE_BYTES)
        self.check_unsent()
        if self._acceptance_timer is None:
            loop = asyncio.get_running_loop()
            self._acceptance_timer = loop.call_later(ACCEPTANCE_S, self._has_mail.set)

    def note_build(
        self, request: Request, *, is_new: bool, traits_of: Callable[[str], Mapping[str, str]]
    ) -> None:
        """Sends the frontend the name of the workers' build that makes the tokens of a request, if
        `is_new` is true or the frontend asks for the traits of the workers. `is_new` says that the
        request had no tokens of this build before. `traits_of` returns the traits of a build."""
        wants_traits = request in self._with_traits
        if request.build and (is_new or wants_traits):
            traits = traits_of(request.build) if wants_traits else {}
            self._outbox.builds.add(
                request_id=request.request_id, build=request.build, traits=traits
            )
            n_characters = sum(len(name) + len(value) for name, value in traits.items())
            self._note_bytes(UPDATE_BYTES + n_characters)

    def reject(self, request_id: str, error: OrcinusError) -> None:
        rejection = self._outbox.rejected.add(
            request_id=request_id, reason=_rejection_reason(error), message=error.message
        )
        if isinstance(error, InvalidRequest):
            rejection.field = error.field
            rejection.message = error.message.removeprefix(f"{error.field}: ")
        if isinstance(error, PoolFull):
            rejection.retry_after.FromNanoseconds(int(error.retry_after_s * 1e9))
        if isinstance(error, TooLate) and error.account_s:
            rejection.account_time.FromNanoseconds(int(error.account_s * 1e9))
        self._note_update(error.message)

    def update(self, updates: Sequence[Update]) -> None:
        """Adds the updates of an iteration, or of another event, to the next message."""
        numbers, columns = self._numbers, self._columns.next_iteration()
        for update in updates:
            request, token_id, reason, n_generated, message, logprobs = update
            if logprobs is not None:
                self._add_with_logprobs(update, logprobs)
            elif token_id is not None:
                number = numbers.get(request)
                if number is None or n_generated == 1:
                    self._add_token(request, token_id, start=n_generated - 1)
                else:
                    columns.append((number, n_generated - 1, token_id))
            if reason is not None:
                self._forget(request)
                self._note_bytes(UPDATE_BYTES)
                self._outbox.completed.add(
                    request_id=request.request_id, reason=_REASONS[reason], message=message
                )
        n_entries = len(updates) - len(columns)
        self._note_bytes(UPDATE_BYTES * n_entries + COLUMN_BYTES * len(columns))
        self._has_mail.set()

    def _add_token(self, request: Request, token_id: int, *, start: int) -> None:
        """Adds a token as a separate entry of the message. The first token of a request is sent
        like this, and every token of a request without a number."""
        self._outbox.tokens.add(
            request_id=request.request_id,
            token_ids=[token_id],
            start=start,
            n_cached_tokens=0 if start else request.n_cached_tokens,
        )

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._numbers.pop(request, None)
        self._with_traits.discard(request)

    def _add_with_logprobs(self, update: Update, logprobs: SpanLogprobs) -> None:
        """Adds an update that has log-probabilities or a vector. If there are too many
        log-probabilities for one message, they are divided among several messages."""
        pieces = iter(logprobs.prompt)
        while True:
            has_token = update.token_id is not None
            tokens = self._outbox.tokens.add(
                request_id=update.request.request_id, start=update.n_generated - has_token
            )
            for position, data in pieces:
                tokens.prompt_logprobs.add(position=position, logprobs=data)
                self._note_logprobs(len(data))
                if self._n_logprob_bytes > MAX_LOGPROB_BYTES:
                    break
            else:
                break
            self._seal()
        if logprobs.vector:
            tokens.vector = logprobs.vector
            tokens.n_cached_tokens = update.request.n_cached_tokens
            self._note_logprobs(len(logprobs.vector))
        if update.token_id is not None:
            tokens.token_ids.append(update.token_id)
            tokens.n_cached_tokens = 0 if tokens.start else update.request.n_cached_tokens
            tokens.logprobs = logprobs.sampled
            self._note_logprobs(len(logprobs.sampled))
        if self._n_logprob_bytes > MAX_LOGPROB_BYTES:
            self._seal()

    def _note_logprobs(self, n_bytes: int) -> None:
        self._n_logprob_bytes += n_bytes
        self._note_bytes(n_bytes)

    def _note_bytes(self, n_bytes: int) -> None:
        self._n_outbox_bytes += n_bytes
        self._n_unsent_bytes += n_bytes

    def _seal(self) -> None:
        """Completes the message in the outbox, and begins a new message that is sent after it."""
        n_bytes = self._n_outbox_bytes
        self._sealed.append((self._take_outbox(), n_bytes))
        self._has_mail.set()

    def _take_outbox(self) -> scheduler_pb2.ConnectResponse:
        if self._columns:
            self._columns.move_to(self._outbox.columns)
        self._n_outbox_bytes = self._n_logprob_bytes = 0
        if self._acceptance_timer is not None:
            self._acceptance_timer.cancel()
            self._acceptance_timer = None
        message, self._outbox = self._outbox, scheduler_pb2.ConnectResponse()
        return message

    def suspend(self, request: Request) -> None:
        """Reports to the frontend that a request waits for the next pipeline."""
        self._outbox.suspended.add(request_id=request.request_id, n_losses=request.n_losses)
        self._note_update()

    def end(self, message: str) -> None:
        """Ends all requests as UNAVAILABLE, and ends the stream after the messages that wait."""
        self.close()
        for request_id in self.requests:
            self._outbox.completed.add(
                request_id=request_id,
                reason=scheduler_pb2.COMPLETION_REASON_UNAVAILABLE,
                message=message,
            )
            self._note_update()
        self.requests.clear()
        self._numbers.clear()
        self._with_traits.clear()
        self._is_ending = True

    def _note_update(self, text: str = "") -> None:
        self._note_bytes(UPDATE_BYTES + len(text))
        self.check_unsent()
        self._has_mail.set()


def _rejection_reason(error: OrcinusError) -> scheduler_pb2.RejectionReason:
    if isinstance(error, InvalidRequest):
        return scheduler_pb2.REJECTION_REASON_INVALID
    if isinstance(error, KeyRate):
        return scheduler_pb2.REJECTION_REASON_KEY_RATE
    if isinstance(error, KeyInFlight):
        return scheduler_pb2.REJECTION_REASON_KEY_IN_FLIGHT
    if isinstance(error, TooLate):
        return scheduler_pb2.REJECTION_REASON_TOO_LATE
    if isinstance(error, PoolFull):
        return scheduler_pb2.REJECTION_REASON_POOL_FULL
    return scheduler_pb2.REJECTION_REASON_UNAVAILABLE
