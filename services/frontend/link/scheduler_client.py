"""The frontend's one stream to the scheduler that leads.

Requests and cancellations are sent over the stream. The results of an iteration come back in one
message and are handed to the receivers of the requests concerned. The scheduler says when it has a
pipeline and when it has none; while there is none, new requests are held here. When a pipeline or a
scheduler is lost, a request is submitted to the next one with the tokens that the request has
(`submitted_request`), and generation goes on after these tokens. The client of the request notices
only a pause, unless the request reaches its time limit first.

When the stream ends, `SchedulerClient` begins another stream (`scheduler_stream`) to the scheduler
that leads then.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable

from orcinus.v1 import scheduler_pb2

from services.common import errors, rpc
from services.common.outage_log import OutageLog
from services.frontend.link.adapter_link import AdapterLink
from services.frontend.link.backoff import Backoff
from services.frontend.link.demand import Demand
from services.frontend.link.known_pipeline import NO_PIPELINE, STOPPING, KnownPipeline
from services.frontend.link.pool_gate import PoolGate
from services.frontend.link.scheduler_events import (
    Accepted,
    Built,
    Event,
    Failed,
    OutputTokens,
    PromptLogprobs,
    Suspended,
    columns_of,
    ends_of,
    news_of,
    tokens_of,
)
from services.frontend.link.scheduler_stream import SchedulerStream
from services.frontend.link.submitted_request import EventSink, SubmittedRequest
from services.frontend.observing.request_span import UNRECORDED, RequestSpan
from services.frontend.request.pipeline import ServedPipeline
from services.frontend.request.refusals import Refusal, Refusals

log = logging.getLogger(__name__)

ATTEMPT_PAUSE_S = 0.1
"""Seconds of pause before a refused request is sent again, while a pipeline serves."""


class SchedulerClient:
    """Submits requests, at once or as soon as possible, and delivers their events. Times are
    readings of the event loop's clock."""

    def __init__(
        self,
        address: str,
        *,
        connect: rpc.Connect = rpc.connect,
        backoff: Backoff | None = None,
        resume_s: float = 600.0,
        on_tokens: Callable[[], None] = lambda: None,
        refusals: Refusals | None = None,
    ) -> None:
        """`on_tokens` is called for each message of the scheduler that has new tokens or ends of
        requests. `refusals` counts requests that the scheduler refuses because of a limit."""
        self._address = address
        self._resume_s = resume_s
        self._expiry: asyncio.TimerHandle | None = None  # set while there is no pipeline
        self._connect = connect
        self._backoff = backoff or Backoff()
        self._on_tokens = on_tokens
        self._refusals = Refusals() if refusals is None else refusals
        self._gate = PoolGate(self._refusals)
        self._requests: dict[str, SubmittedRequest] = {}
        self._numbered: dict[int, SubmittedRequest] = {}  # the same requests, by number
        self._numbers = itertools.count()
        self._stream = SchedulerStream(address, connect)
        self.pipeline = KnownPipeline()
        """The state of the scheduler's pipeline, as the scheduler has last reported it."""
        self._demand = Demand(
            lambda: self.pipeline.n_waiting + self.n_held,
            lambda message: self._stream.send(message),
        )
        self.pipeline.on_waiting = self._demand.note_change
        self.adapters = AdapterLink(
            lambda message: self._stream.send(message), self.pipeline.set_loaded
        )
        """The adapters that clients have loaded, and commands about them."""
        self._has_leader = False
        self._outage = OutageLog.of_peer(log, f"the scheduler at {address}")
        self.n_resubmitted = 0
        """Number of times that a request was sent again, over all requests."""

    @property
    def n_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def n_held(self) -> int:
        """Number of requests that are held, which means that they wait to be sent."""
        return sum(request.is_held for request in list(self._requests.values()))

    def check_room(self) -> None:
        """Checks that the scheduler's pool has room for a new call. Without a pipeline the check
        always succeeds, because the call may be held.

        Raises:
            PoolFull: the scheduler has no free place.
        """
        if self.pipeline.is_open:
            self._gate.check(now=_now())

    def check_time(self, account: str, priority: int) -> None:
        """Checks that a request of an account would have its first token in time. Without a
        pipeline the check always succeeds, because the request may be held.

        Raises:
            PoolFull: the first token of the request would be too late.
        """
        if self.pipeline.is_open:
            self._gate.check_time(account, priority, now=_now())

    def submit(
        self,
        submission: scheduler_pb2.Submission,
        inbox: EventSink,
        *,
        model: str,
        until: float | None,
        deadline: float | None = None,
        was_held: bool = False,
        span: RequestSpan = UNRECORDED,
    ) -> None:
        """Sends a request for the model `model`. The inbox gets the events of the request until the
        request ends or is cancelled.

        A request that cannot be sent is held, and a request that fails as unavailable is sent
        again. Both are done until the time `until`, by default for `resume_s` seconds from now. If
        a scheduler accepts the request and is then lost, the limit becomes `resume_s` seconds after
        the loss. So a request may be accepted more than once.

        `generated_token_ids` of the submission are the output tokens that the request has already;
        the events carry only later tokens. A request that was held, here or before this call
        (`was_held`), is also sent again when the pool is full, because all held requests come at
        once. `span` records each time that the request is held or sent again. If the request still
        waits in the scheduler's pool at the time `deadline`, the scheduler drops the request.
        """
        request = SubmittedRequest(
            submission=submission,
            inbox=inbox,
            model=model,
            until=_now() + self._resume_s if until is None else until,
            deadline=deadline,
            was_held=was_held,
            span=span,
        )
        submission.number = next(self._numbers) % 2**32
        self._requests[request.request_id] = request
        self._numbered[submission.number] = request
        self._attempt(request)

    def cancel(self, request_id: str) -> None:
        """Ends a request if it still runs. No more of its events are delivered."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._forget(request)
        if request.is_held:
            request.release()
            self._demand.note_change()
            return
        cancellation = scheduler_pb2.Cancellation(request_id=request_id)
        self._stream.send(scheduler_pb2.ConnectRequest(cancellation=cancellation))

    def close(self) -> None:
        """Ends all requests with the error Unavailable, and refuses new ones."""
        self.pipeline.is_stopping = True
        self._shut()
        for request in list(self._requests.values()):
            self._fail(request, errors.Unavailable(STOPPING))

    async def run(self) -> None:
        """Keeps a stream to the leading scheduler open until cancelled. After the end of a stream,
        opens the next one."""
        n_failures = 0
        while True:
            self._stream = SchedulerStream(self._address, self._connect)
            self._gate.reset()
            reason = await self._stream.converse(opened=self._note_leader, received=self._apply)
            n_failures = 1 if self._has_leader else n_failures + 1
            if n_failures == 1:
                log.info("no scheduler at %s: %s", self._address, reason)
            self._outage.failed(reason)
            self._lose()
            await asyncio.sleep(self._backoff.pause_s(n_failures))

    def _note_leader(self) -> None:
        self._has_leader = True
        self._outage.worked()
        self.adapters.open()
        self.pipeline.note_change()

    def _apply(self, response: scheduler_pb2.ConnectResponse) -> None:
        if response.tokens or response.completed or response.HasField("columns"):
            self._on_tokens()
        self._gate.update(response, now=_now())
        for rejected in response.rejected:
            if rejected.HasField("account_time"):
                self._note_late(rejected)
        self.adapters.take(response)
        # One message may have failures and the pipeline that came after them: requests that are
        # sent again must meet the newer state.
        if response.is_closed:
            self._shut()
        elif response.HasField("pipeline") and not self.pipeline.is_stopping:
            self._open(ServedPipeline.from_proto(response.pipeline))
        if response.HasField("sleep") and not self.pipeline.is_open:
            self._sleep(response.sleep)
        if response.shortfall and not self.pipeline.is_open:
            self.pipeline.shortfall = response.shortfall
        for event in news_of(response):
            self._deliver(event)
        self._deliver_columns(response)
        for event in ends_of(response):
            self._deliver(event)

    def _note_late(self, rejected: scheduler_pb2.Rejection) -> None:
        request = self._requests.get(rejected.request_id)
        if request is not None:
            submission = request.submission
            for_s = rejected.account_time.ToNanoseconds() / 1e9
            self._gate.note_late(submission.account.name, submission.priority, for_s, now=_now())

    def _open(self, pipeline: ServedPipeline) -> None:
        if not self.pipeline.was(pipeline):
            log.info("scheduler at %s serves %s", self._address, pipeline)
        if self._expiry is not None:
            self._expiry.cancel()
        self._demand.end()
        self.pipeline.open(pipeline)
        for request in list(self._requests.values()):
            if request.is_held:
                self._attempt(request)

    def _sleep(self, message: scheduler_pb2.Sleep) -> None:
        self.pipeline.sleep(message)
        log.info("scheduler at %s: %s", self._address, self.pipeline.trouble)
        self._demand.begin()

    def _shut(self) -> None:
        if self.pipeline.is_open:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._resume_s, self._expire)
        self.pipeline.shut()

    def _expire(self) -> None:
        """Ends, with an error, the requests that have got no token since the pipeline was lost.
        Called `resume_s` seconds after the loss. Held requests, which have their own time limits,
        are left alone."""
        for request in list(self._requests.values()):
            if request.is_stalled and not request.is_held:
                self.cancel(request.request_id)
                self._end(request, errors.Unavailable("the pipeline was lost; try again"))

    def _lose(self) -> None:
        self._has_leader = False
        self.adapters.lose()
        self._demand.end()
        self.pipeline.shortfall = ""
        self._shut()
        for request in list(self._requests.values()):
            # The end of a request may have cancelled others of the same call.
            if request.request_id in self._requests and not request.is_held:
                self._hold(request, errors.Unavailable("the scheduler was lost; try again"))

    def _deliver(self, event: Event) -> None:
        request = self._requests.get(event.request_id)
        if request is None or request.next_attempt is not None:
            return  # it was cancelled a moment ago, or has failed and is held
        match event:
            case OutputTokens() | PromptLogprobs():
                self._deliver_news(request, event)
                return
            case Accepted():
                request.is_accepted = True
            case Suspended():
                request.suspend(event.n_losses)
                return
            case Built():
                self._note_build(request, event)
                return
            case Failed(error=errors.Unavailable() as error):
                self._hold(request, error)
                return
            case Failed(error=errors.PoolFull() as error) if request.was_held:
                self._hold(request, error, pause_s=max(error.retry_after_s, ATTEMPT_PAUSE_S))
                return
            case Failed(refusal=Refusal() as refusal):
                self._refusals[refusal] += 1
        if event.is_last:
            self._forget(request)
        request.inbox.put_nowait(event)

    def _note_build(self, request: SubmittedRequest, event: Built) -> None:
        """Notes the build of the workers that compute a request from now on. Delivers the event if
        it has the workers' traits (facts such as the digest of the weights). Only requests that
        asked for traits get them."""
        request.submission.build = event.build
        if event.traits:
            request.inbox.put_nowait(event)

    def _deliver_columns(self, response: scheduler_pb2.ConnectResponse) -> None:
        """Delivers the tokens that a message has in columns (parallel lists). Nearly all tokens
        come in columns, so this code is fast: it makes only one event for each request."""
        numbered = self._numbered
        for number, start, token_ids in columns_of(response):
            request = numbered.get(number)
            if request is None or request.next_attempt is not None:
                continue
            try:
                news = request.new_tokens(
                    tokens_of((request.request_id, token_ids, start, None, 0))
                )
            except errors.RequestFailed as error:
                self._end_wrong(request, error)
                continue
            request.inbox.put_nowait(news)

    def _deliver_news(
        self, request: SubmittedRequest, event: OutputTokens | PromptLogprobs
    ) -> None:
        """Delivers the tokens or log-probabilities of an event that the request does not have yet,
        if there are any. Ends the request if the event does not fit the tokens that the request
        already has."""
        try:
            if isinstance(event, OutputTokens):
                news: Event | None = request.new_tokens(event)
            else:
                news = request.new_prompt_logprobs(event)
        except errors.RequestFailed as error:
            self._end_wrong(request, error)
            return
        if news is not None:
            request.inbox.put_nowait(news)

    def _end_wrong(self, request: SubmittedRequest, error: errors.RequestFailed) -> None:
        """Ends a request for which the scheduler has sent tokens or log-probabilities that do not
        fit."""
        log.error("bug in the scheduler: request %s: %s", request.request_id, error)
        self.cancel(request.request_id)
        self._end(request, error)

    def _attempt(self, request: SubmittedRequest) -> None:
        """Sends a request, or holds the request if it cannot be sent now. Ends the request with the
        error Unavailable if another model is served now, or if this process is stopping."""
        request.release()
        pipeline = self.pipeline.current
        if self.pipeline.is_stopping:
            self._fail(request, errors.Unavailable(STOPPING))
        elif pipeline is None:
            self._hold(request, errors.Unavailable(NO_PIPELINE))
        elif pipeline.model != request.model:
            self._fail(request, errors.Unavailable("another model is served now; try again"))
        elif self._stream.is_congested:
            self._hold(request, errors.Unavailable("the scheduler does not keep up; try again"))
        else:
            if request.deadline is not None:
                left_s = max(0.0, request.deadline - _now())
                request.submission.time_left.FromNanoseconds(int(left_s * 1e9))
            self._stream.send(request.message())
            self._gate.note_sent()
            if request.was_sent:
                self.n_resubmitted += 1
                request.span.resubmitted(request.request_id, request.failure)
            request.was_sent = True

    def _hold(
        self,
        request: SubmittedRequest,
        error: errors.Unavailable | errors.PoolFull,
        *,
        pause_s: float = ATTEMPT_PAUSE_S,
    ) -> None:
        """Keeps a failed request for another attempt to send it. If the time of the request is
        over, ends the request with the error instead."""
        loop = asyncio.get_running_loop()
        now = _now()
        request.lose(until=now + self._resume_s)
        if now >= request.until:
            self._fail(request, error)
            return
        request.span.held(request.request_id, error.message)
        request.failure = error.message
        request.was_held = True
        at = min(request.until, now + pause_s) if self.pipeline.is_open else request.until
        request.next_attempt = loop.call_at(at, self._attempt, request)
        self._demand.note_change()

    def _fail(self, request: SubmittedRequest, error: errors.Unavailable | errors.PoolFull) -> None:
        request.release()
        if request.request_id in self._requests:
            self._forget(request)
            self._end(request, error)

    def _forget(self, request: SubmittedRequest) -> None:
        del self._requests[request.request_id]
        del self._numbered[request.submission.number]

    def _end(self, request: SubmittedRequest, error: errors.OrcinusError) -> None:
        request.inbox.put_nowait(Failed(request.request_id, error))


def _now() -> float:
    return asyncio.get_running_loop().time()
