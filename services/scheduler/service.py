"""SchedulerService: requests come in from frontends, their tokens go out.

A frontend owns what its requests have got: one that loses its scheduler submits them to the next
one with their tokens. A request that loses its pipeline stays here, and waits for the next one.

There is one stream per frontend; all tokens of an iteration for it leave as one message. A frontend
that does not read is cut off, and its requests are cancelled; if it lives, it comes back and
submits them again. Knows neither batches nor stages.
"""

import asyncio
import hashlib
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any

import grpc.aio
from orcinus.v1 import sampling_pb2, scheduler_pb2

from services.common import tls
from services.common.errors import InvalidRequest, OrcinusError, PoolFull, Unavailable
from services.common.priority import PRIORITIES
from services.common.sampling import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, SamplingParams
from services.common.sampling_proto import from_proto
from services.common.stream_places import StreamPlaces
from services.scheduler.core.accounts import (
    Account,
    AccountLimits,
    Accounts,
    KeyInFlight,
    KeyRate,
)
from services.scheduler.core.batch import SpanLogprobs
from services.scheduler.core.drafts import Speculation
from services.scheduler.core.request import TOKEN_ID, FinishReason, Request, RequestId
from services.scheduler.core.scheduler import Update
from services.scheduler.observing.iteration_log import IterationLog
from services.scheduler.observing.request_observer import RequestObserver
from services.scheduler.serving_loop import ServingLoop
from services.scheduler.settings import FRONTEND_BYTES

log = logging.getLogger(__name__)

CALLERS = {"Connect": {tls.FRONTEND}, "WatchIterations": {tls.FRONTEND}}
"""Roles that may call each method."""

UPDATE_BYTES = 208
"""Bytes that an update counts for besides its log-probabilities: 155, and its copy on the way."""

MAX_LOGPROB_BYTES = 2**20
"""Bytes of log-probabilities after which another message begins; gRPC takes four times as much."""

SEND_LIMIT_S = 10.0
"""Seconds in which a frontend must take a message. One whose event loop hangs ends itself before
that, and one that is stopped or cut off is noticed by gRPC's pings."""

MAX_WATCHERS = 16
"""Calls of WatchIterations at most."""

MAX_SALT_LENGTH = 256
"""Characters of a salt of the prefix cache, as frontends allow."""

MAX_REQUEST_ID_LENGTH = 256
"""Characters in the name of a request; frontends make them of about forty."""

_REASONS = {
    FinishReason.STOP: scheduler_pb2.COMPLETION_REASON_STOP,
    FinishReason.LENGTH: scheduler_pb2.COMPLETION_REASON_LENGTH,
    FinishReason.CANCELLED: scheduler_pb2.COMPLETION_REASON_CANCELLED,
    FinishReason.FAILED: scheduler_pb2.COMPLETION_REASON_FAILED,
    FinishReason.TIMED_OUT: scheduler_pb2.COMPLETION_REASON_TIMED_OUT,
}


class Connection:
    """A connected frontend: its requests, and the message that waits to be sent to it."""

    def __init__(self, n_free: Callable[[], int | None] = lambda: None) -> None:
        """`n_free` returns the places that the pool has at the moment, None while no request is
        taken."""
        self._n_free = n_free
        self._is_told_full = False
        self.requests: dict[str, Request] = {}
        self.is_overfull = asyncio.Event()
        """Set once too much waits to be sent."""
        self._outbox = scheduler_pb2.ConnectResponse()
        self._sealed: deque[tuple[scheduler_pb2.ConnectResponse, int]] = deque()  # of before it
        self._n_logprob_bytes = 0  # in the outbox
        self._n_outbox_bytes = 0
        self._n_leaving_bytes = 0  # of the message that was returned last
        self._n_unsent_bytes = 0  # of that, of those that are sealed and of the outbox
        self._has_mail = asyncio.Event()

    async def next_message(self) -> scheduler_pb2.ConnectResponse:
        """Waits for news and returns all that has come since the last message, which has been sent
        when this is called."""
        self._n_unsent_bytes -= self._n_leaving_bytes
        self._n_leaving_bytes = 0
        await self._has_mail.wait()
        if self._sealed:
            message, self._n_leaving_bytes = self._sealed.popleft()
            return message
        self._has_mail.clear()
        self._n_leaving_bytes = self._n_outbox_bytes
        self._n_outbox_bytes = self._n_logprob_bytes = 0
        message, self._outbox = self._outbox, scheduler_pb2.ConnectResponse()
        n_free = self._n_free()
        if n_free is not None:
            message.n_free = n_free
        self._is_told_full = n_free == 0
        return message

    def check_unsent(self) -> None:
        """Sets `is_overfull` if more waits to be sent than the memory that there is for it. Called
        before an iteration's updates come: what a single one brings is never too much."""
        if self._n_unsent_bytes > FRONTEND_BYTES:
            self.is_overfull.set()

    def note_room(self) -> None:
        """Tells the frontend of a free place, if it was told that there is none."""
        if self._is_told_full:
            self._has_mail.set()

    def open(self, pipeline: scheduler_pb2.PipelineDescription) -> None:
        """Tells the frontend what is served, so that requests may come."""
        self._outbox.pipeline.CopyFrom(pipeline)
        self._outbox.is_closed = False
        self._note_update()

    def close(self) -> None:
        """Tells the frontend that no more requests are taken, in a message after all that was
        before."""
        if self._has_mail.is_set():
            self._seal()
        self._outbox.ClearField("pipeline")
        self._outbox.is_closed = True
        self._note_update()

    def accept(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._outbox.accepted.add(request_id=request.request_id)
        self._note_update()

    def reject(self, request_id: str, error: OrcinusError) -> None:
        rejection = self._outbox.rejected.add(
            request_id=request_id, reason=_rejection_reason(error), message=error.message
        )
        if isinstance(error, InvalidRequest):
            rejection.field = error.field
            rejection.message = error.message.removeprefix(f"{error.field}: ")
        if isinstance(error, PoolFull):
            rejection.retry_after.FromNanoseconds(int(error.retry_after_s * 1e9))
        self._note_update(error.message)

    def update(self, update: Update) -> None:
        request, reason = update.request, update.finish_reason
        request_id = request.request_id
        if update.logprobs is not None:
            self._add_with_logprobs(update, update.logprobs)
        elif update.token_id is not None:
            start = update.n_generated - 1
            self._outbox.tokens.add(
                request_id=request_id,
                token_ids=[update.token_id],
                start=start,
                n_cached_tokens=0 if start else request.n_cached_tokens,
            )
        if reason is not None:
            del self.requests[request_id]
            self._outbox.completed.add(
                request_id=request_id, reason=_REASONS[reason], message=update.message
            )
        self._note_bytes(UPDATE_BYTES)
        self._has_mail.set()

    def _add_with_logprobs(self, update: Update, logprobs: SpanLogprobs) -> None:
        """Adds the tokens of an update that has log-probabilities. Of these, a message of its own
        is made when there are many."""
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
        """Begins another message, which is sent after all that was before."""
        self._sealed.append((self._outbox, self._n_outbox_bytes))
        self._outbox = scheduler_pb2.ConnectResponse()
        self._n_outbox_bytes = self._n_logprob_bytes = 0
        self._has_mail.set()

    def suspend(self, request: Request) -> None:
        """Tells the frontend that a request waits for the next pipeline."""
        self._outbox.suspended.add(request_id=request.request_id, n_losses=request.n_losses)
        self._note_update()

    def fail(self, message: str) -> None:
        """Ends all requests as UNAVAILABLE."""
        for request_id in self.requests:
            self._outbox.completed.add(
                request_id=request_id,
                reason=scheduler_pb2.COMPLETION_REASON_UNAVAILABLE,
                message=message,
            )
            self._note_update()
        self.requests.clear()

    def _note_update(self, text: str = "") -> None:
        self._note_bytes(UPDATE_BYTES + len(text))
        self.check_unsent()
        self._has_mail.set()


class SchedulerService:
    """The servicer of orcinus.v1.SchedulerService.

    Frontends stay connected as long as this scheduler leads, whether there is a pipeline or not;
    they are told when one opens and when it closes.
    """

    def __init__(
        self,
        requests: RequestObserver,
        *,
        max_frontends: int = 32,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = requests
        self._now = now
        self._accounts = Accounts()
        self._frontend_places = StreamPlaces(max_frontends, of="frontends")
        self._watcher_places = StreamPlaces(MAX_WATCHERS, of="watchers of iterations")
        self._connections: dict[Request, Connection] = {}
        self._frontends: set[Connection] = set()
        self._is_leading = False
        self._is_open = False
        self._pipeline = scheduler_pb2.PipelineDescription()
        self._loop: ServingLoop
        self._log: IterationLog | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._is_open

    def lead(self) -> None:
        """Lets frontends in from now on."""
        self._is_leading = True

    def open(
        self,
        pipeline: scheduler_pb2.PipelineDescription,
        loop: ServingLoop,
        iteration_log: IterationLog,
    ) -> None:
        """Takes submissions from now on, and hands them to `loop`.

        Requests for another model than this pipeline's are given up, and so are those that another
        checkpoint of that name cannot take: they would end its ranks.
        """
        for request in list(self._connections) if pipeline != self._pipeline else ():
            if self._pipeline.model != pipeline.model:
                self._loop.cancel(request)
            elif (refusal := _refusal(request, pipeline)) is not None:
                loop.give_up(request, f"the pipeline that serves now cannot: {refusal.message}")
        self._pipeline, self._loop, self._log = pipeline, loop, iteration_log
        self._is_open = True
        for frontend in self._frontends:
            frontend.open(pipeline)

    def close(self) -> None:
        """Refuses submissions from now on, as UNAVAILABLE; what is in the pool stays there."""
        self._is_open = False
        for frontend in self._frontends:
            frontend.close()

    def deliver(self, updates: Iterable[Update]) -> None:
        """Puts the updates of an iteration into the outboxes of the frontends that they are for."""
        now, has_ended = self._now(), False
        for frontend in self._frontends:
            frontend.check_unsent()
        for update in updates:
            request, reason = update.request, update.finish_reason
            if update.token_id is not None:
                if request.account is not None:
                    request.account.charge(1, now)
                if request.n_new_tokens == 1:
                    self._observer.first_token(request)
            if reason is None:
                self._connections[request].update(update)
            else:
                self._connections.pop(request).update(update)
                self._observer.ended(request, reason)
                has_ended = True
        if has_ended:
            for frontend in self._frontends:
                frontend.note_room()

    def suspend(self, begun: Iterable[Request], ended: Iterable[Update]) -> None:
        """Takes no submissions until the next pipeline is there, and tells the frontends that their
        requests wait for it; `ended` could not wait."""
        self.close()
        self._log = None
        for request, frontend in self._connections.items():
            frontend.suspend(request)
        for request in begun:
            self._observer.suspended(request)
        self.deliver(ended)

    def fail_all(self, message: str) -> None:
        """Ends every request as UNAVAILABLE and refuses new ones."""
        self.close()
        self._log = None
        for request in self._connections:
            self._observer.failed(request)
        self._connections.clear()
        for frontend in self._frontends:
            frontend.fail(message)

    async def Connect(self, context: Any) -> None:
        """Serves one frontend until it or this scheduler goes away.

        Raises:
            Unavailable: this scheduler does not lead, or the frontend does not read.
            PoolFull: there are too many frontends.
            InvalidRequest: it breaks the rules in a way that concerns no single request.
        """
        if not self._is_leading:
            raise Unavailable("this scheduler is not the leader")
        self._frontend_places.take()
        await context.send_initial_metadata(())  # the frontend knows that it has found the leader
        connection = Connection(self._n_free)
        if self._is_open:
            connection.open(self._pipeline)
        self._frontends.add(connection)
        reading = asyncio.create_task(self._read(connection, context), name="frontend reader")
        writing = asyncio.create_task(_write(connection, context), name="frontend writer")
        watching = asyncio.create_task(connection.is_overfull.wait(), name="outbox watch")
        tasks = (reading, writing, watching)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._frontends.discard(connection)
            self._cancel_all(connection)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, grpc.aio.BaseError):
                log.info("a frontend is gone: %s", error)
            elif isinstance(error, TimeoutError) or error is True:
                log.warning("a frontend does not read, and is cut off: %s", context.peer())
                raise Unavailable("this frontend does not read")
            elif isinstance(error, Exception):
                raise error

    async def WatchIterations(
        self, request: scheduler_pb2.WatchIterationsRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchIterationsResponse]:
        """Streams a record of each iteration from now on.

        Raises:
            Unavailable: there is no pipeline yet, or no more.
            PoolFull: there are too many watchers.
        """
        if self._log is None:
            raise Unavailable("no pipeline has formed yet")
        self._watcher_places.take()
        with self._log.watch() as records:
            await context.send_initial_metadata(())  # the caller knows that it misses nothing now
            async for record in records:
                yield record

    def _n_free(self) -> int | None:
        return self._loop.n_free if self._is_open else None

    async def _read(self, connection: Connection, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self._take(connection, message)

    def _take(self, connection: Connection, message: scheduler_pb2.ConnectRequest) -> None:
        if message.HasField("submission"):
            if len(message.submission.request_id) > MAX_REQUEST_ID_LENGTH:
                raise InvalidRequest("request_id", f"exceeds {MAX_REQUEST_ID_LENGTH} characters")
            try:
                self._submit(connection, message.submission)
            except OrcinusError as error:
                connection.reject(message.submission.request_id, error)
                self._observer.rejected(message.submission, error)
        elif message.HasField("cancellation"):
            request = connection.requests.get(message.cancellation.request_id)
            if request is not None:
                self._loop.cancel(request)

    def _submit(self, connection: Connection, submission: scheduler_pb2.Submission) -> None:
        if not self._is_open:
            raise Unavailable("the scheduler takes no requests at the moment")
        if not submission.HasField("sampling"):  # others' defaults would give other tokens
            raise Unavailable("the frontend is of another version than the scheduler")
        sampling = from_proto(submission.sampling)
        self._check(connection, submission, sampling)
        now = self._now()
        account = self._account_of(submission, now)
        submission.sampling.seed = sampling.seed  # drawn here if need be: ranks must have the same
        request = Request(
            request_id=RequestId(submission.request_id),
            prompt_token_ids=array(TOKEN_ID, submission.prompt_token_ids),
            max_new_tokens=submission.max_new_tokens,
            sampling=submission.sampling.SerializeToString(),
            grammar_digest=_digest(sampling.grammar) if sampling.grammar else None,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            speculation=_speculation_of(submission, sampling),
            generated_token_ids=array(TOKEN_ID, submission.generated_token_ids),
            n_losses=submission.n_losses,
            account=account,
            priority=submission.priority,
            deadline=_deadline_of(submission, now),
            cache_scope=_cache_scope(submission),
            n_logprobs=submission.n_logprobs if submission.HasField("n_logprobs") else None,
            n_prompt_logprobs=(
                submission.n_prompt_logprobs if submission.HasField("n_prompt_logprobs") else None
            ),
        )
        self._loop.submit(request)
        if account is not None and not submission.is_resubmitted:
            account.charge(request.n_prompt_tokens, now)
        self._connections[request] = connection
        connection.accept(request)
        self._observer.submitted(request, submission)

    def _account_of(self, submission: scheduler_pb2.Submission, now: float) -> Account | None:
        """Returns the account of a request, which must have room for it; None if it has none."""
        if not submission.HasField("account"):
            return None
        limits = AccountLimits(
            tokens_per_minute=submission.account.tokens_per_minute or None,
            max_in_flight_tokens=submission.account.max_in_flight_tokens or None,
            weight=submission.account.weight or 1.0,
        )
        account = self._accounts.find(submission.account.name, limits, now)
        if not submission.is_resubmitted:
            n_tokens = len(submission.prompt_token_ids) + submission.max_new_tokens
            account.check(n_tokens, now)
        return account

    def _check(
        self,
        connection: Connection,
        submission: scheduler_pb2.Submission,
        sampling: SamplingParams,
    ) -> None:
        if submission.request_id in connection.requests:
            raise InvalidRequest("request_id", f"{submission.request_id!r} is in use")
        _check_sequence(submission, self._pipeline)
        PRIORITIES.check("priority", submission.priority)
        if submission.account.weight < 0 or not math.isfinite(submission.account.weight):
            raise InvalidRequest("account", f"cannot have the weight {submission.account.weight}")
        if len(submission.cache_salt) > MAX_SALT_LENGTH:
            raise InvalidRequest("cache_salt", f"exceeds {MAX_SALT_LENGTH} characters")
        for field in ("n_logprobs", "n_prompt_logprobs"):
            if getattr(submission, field) > MAX_LOGPROBS:
                raise InvalidRequest(field.removeprefix("n_"), f"{MAX_LOGPROBS} at most")
        n_numbers = len(submission.prompt_token_ids) * (1 + submission.n_prompt_logprobs)
        if submission.HasField("n_prompt_logprobs") and n_numbers > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                "prompt_logprobs", f"are {n_numbers} numbers, {MAX_PROMPT_LOGPROBS} at most"
            )
        check_sampling(sampling, self._pipeline)

    def _cancel_all(self, connection: Connection) -> None:
        for request in list(connection.requests.values()):
            self._loop.cancel(request)


async def _write(connection: Connection, context: Any) -> None:
    """Sends what there is for a frontend, for ever.

    Raises:
        TimeoutError: it does not take a message.
    """
    while True:
        message = await connection.next_message()
        async with asyncio.timeout(SEND_LIMIT_S):
            await context.write(message)


def _deadline_of(submission: scheduler_pb2.Submission, now: float) -> float | None:
    if not submission.HasField("time_left"):
        return None
    return now + submission.time_left.ToNanoseconds() / 1e9


def _speculation_of(
    submission: scheduler_pb2.Submission, sampling: SamplingParams
) -> Speculation | None:
    """Returns the beginning of speculation, where each of a request's tokens is chosen by its
    logits and position alone; None elsewhere: penalties and grammars look at all tokens before, and
    log-probabilities of drafts are of no use."""
    if sampling.has_penalty or sampling.grammar or submission.HasField("n_logprobs"):
        return None
    return Speculation()


def _cache_scope(submission: scheduler_pb2.Submission) -> bytes | None:
    """Returns the name of those who share keys and values with a request; None if nobody does."""
    if submission.is_uncached:
        return None
    name = submission.account.name
    return f"{len(name)}:{name}{submission.cache_salt}".encode()


def _check_sequence(
    request: scheduler_pb2.Submission | Request, pipeline: scheduler_pb2.PipelineDescription
) -> None:
    prompt, generated = request.prompt_token_ids, request.generated_token_ids
    largest = max(max(prompt, default=0), max(generated, default=0))
    if largest >= pipeline.vocab_size:
        raise InvalidRequest("prompt", f"token {largest} is not below {pipeline.vocab_size}")
    n_tokens = len(prompt) + request.max_new_tokens
    if n_tokens > pipeline.max_model_len:
        raise InvalidRequest(
            "max_tokens",
            f"prompt and output of {n_tokens} tokens exceed the limit of {pipeline.max_model_len}",
        )


def _refusal(
    request: Request, pipeline: scheduler_pb2.PipelineDescription
) -> InvalidRequest | None:
    """Returns the reason for which a pipeline cannot take a request that was checked for another
    one; None if it can."""
    sampling = from_proto(sampling_pb2.SamplingParams.FromString(request.sampling))
    own = frozenset((*sampling.stop_token_ids, *pipeline.eos_token_ids))
    try:
        _check_sequence(request, pipeline)
        check_sampling(sampling, pipeline, own_stop_token_ids=own)
    except InvalidRequest as error:
        return error
    return None


def check_sampling(
    sampling: SamplingParams,
    pipeline: scheduler_pb2.PipelineDescription,
    *,
    own_stop_token_ids: Collection[int] = (),
) -> None:
    """Checks options for a pipeline: a rank would end itself, and with it everybody's requests,
    over what is refused here. `own_stop_token_ids` are the model's own, if not by default.

    Raises:
        InvalidRequest: the error names the option.
    """
    own = own_stop_token_ids or frozenset(pipeline.eos_token_ids)
    sampling.check(own_stop_token_ids=own)
    if sampling.grammar and not pipeline.can_follow_grammars:
        raise InvalidRequest("grammar", "the model can follow none")
    if min(sampling.stop_token_ids, default=0) < 0:
        raise InvalidRequest("stop_token_ids", "tokens must not be negative")
    sampling.check_vocabulary(pipeline.vocab_size, own_stop_token_ids=own)


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()


def _rejection_reason(error: OrcinusError) -> scheduler_pb2.RejectionReason:
    if isinstance(error, InvalidRequest):
        return scheduler_pb2.REJECTION_REASON_INVALID
    if isinstance(error, KeyRate):
        return scheduler_pb2.REJECTION_REASON_KEY_RATE
    if isinstance(error, KeyInFlight):
        return scheduler_pb2.REJECTION_REASON_KEY_IN_FLIGHT
    if isinstance(error, PoolFull):
        return scheduler_pb2.REJECTION_REASON_POOL_FULL
    return scheduler_pb2.REJECTION_REASON_UNAVAILABLE
