"""SchedulerService: requests come in from frontends, their tokens go out.

A frontend keeps the tokens of its requests. When the connection to its scheduler breaks, it submits
its requests to the next leader, together with the tokens that they have so far. A request whose
pipeline is lost stays in this scheduler and waits for the next pipeline.

There is one stream for each frontend. All tokens of an iteration for a frontend leave as one
message. A frontend that does not read is disconnected, and its requests are cancelled; if the
frontend still runs, it connects again and submits its requests again. The service knows neither
batches nor stages.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import grpc.aio
from orcinus.v1 import scheduler_pb2
from orcinus.v1.scheduler_pb2 import SleepState

from services.common import tls
from services.common.adapter_list import AdapterEntry
from services.common.adapter_list_proto import from_proto
from services.common.address import of_grpc_peer
from services.common.errors import InvalidRequest, OrcinusError, Unavailable
from services.common.pooling import pooling_in
from services.common.stream_places import StreamPlaces
from services.scheduler.adapter_commands import AdapterCommands
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.no_control import NO_CONTROL, NoControl
from services.scheduler.core.batch import Update
from services.scheduler.core.clients.accounts import Accounts, AccountUse
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.fleet import Fleet
from services.scheduler.frontend_stream import FrontendStream
from services.scheduler.known_model import KnownModel
from services.scheduler.observing.request_observer import RequestObserver
from services.scheduler.submission import account_limits, check_submission, refusal, to_request

log = logging.getLogger(__name__)

CALLERS = {"Connect": {tls.FRONTEND}}
"""The roles of the processes that may call each method."""

SEND_LIMIT_S = 10.0
"""Seconds within which a frontend must read a message. A frontend whose event loop hangs ends
itself sooner; a frontend that is stopped or unreachable is noticed by gRPC's pings."""

MESSAGE_PERIOD_S = 0.002
"""Smallest number of seconds between two messages for a frontend. Iterations of several pipelines
that return within this time leave as one message. A message costs as much as some thirty tokens."""

MAX_REQUEST_ID_LENGTH = 256
"""Largest number of characters in the id of a request, or of a command about adapters. Frontends
make ids of about forty."""


class SchedulerService:
    """The servicer of orcinus.v1.SchedulerService.

    Frontends stay connected as long as this scheduler leads, whether there is a pipeline or not.
    They get a message when the first pipeline opens and when the last one closes.
    """

    def __init__(
        self,
        requests: RequestObserver,
        *,
        control: AdmissionControl | NoControl = NO_CONTROL,
        max_frontends: int = 32,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = requests
        self._now = now
        self._control = control
        self._accounts = Accounts()
        self._frontend_places = StreamPlaces(max_frontends, of="frontends")
        self._connections: dict[Request, FrontendStream] = {}
        self._frontends: set[FrontendStream] = set()
        self._traits: dict[str, Mapping[str, str]] = {}  # of the workers of each build
        self._is_leading = False
        self._is_open = False
        self.shortfall = ""
        """Reason why there is no pipeline, as text for clients; empty while a pipeline serves."""
        self.known = KnownModel()
        """Keeps the description of the model, also while no pipeline serves."""
        self.adapters = AdapterCommands(on_change=self._tell_adapters)
        """Loads and unloads adapters while the system runs, and lists the loaded ones."""
        self._fleet: Fleet

    @property
    def is_open(self) -> bool:
        """Whether submissions are accepted."""
        return self._is_open

    @property
    def is_asleep(self) -> bool:
        """Whether no pipeline serves because the model is asleep."""
        return not self._is_open and self.known.sleep_state == SleepState.SLEEP_STATE_ASLEEP

    @property
    def state(self) -> str:
        """State of the model: `serving`, `asleep`, `starting` or `unavailable`. Empty if this
        scheduler does not lead."""
        if self._is_open:
            return "serving"
        return self.known.state_without_pipeline if self._is_leading else ""

    @property
    def n_held(self) -> int:
        """Number of requests that frontends hold while the model is asleep or starts."""
        return sum([frontend.n_held for frontend in self._frontends])

    def lead(self) -> None:
        """Lets frontends connect from now on."""
        self._is_leading = True

    def open(self, pipeline: scheduler_pb2.PipelineDescription, fleet: Fleet) -> None:
        """Notes that another pipeline serves. Accepts submissions from now on, and passes them to
        `fleet`.

        If no other pipeline serves and the last one had a model of another name, all waiting
        requests are cancelled. If the last one had another checkpoint of the same name, requests
        that the new checkpoint cannot run are ended, because they would make the ranks fail.
        """
        self._traits[pipeline.build] = dict(pipeline.traits)
        if self._is_open:
            known = self.known.pipeline
            is_longer = pipeline.max_model_len > known.max_model_len
            if not is_longer and pipeline.build == known.build:
                return
            if not is_longer:
                pipeline = scheduler_pb2.PipelineDescription.FromString(
                    pipeline.SerializeToString()
                )
                pipeline.max_model_len = known.max_model_len
        else:
            self._drop_unfit(pipeline, fleet)
        self.known.pipeline, self._fleet = pipeline, fleet
        self.adapters.note_pipeline(pipeline)
        self._is_open = True
        self.shortfall = ""
        for frontend in self._frontends:
            frontend.open(pipeline)

    def _drop_unfit(self, pipeline: scheduler_pb2.PipelineDescription, fleet: Fleet) -> None:
        """Ends the waiting requests that a new pipeline cannot run."""
        for request in list(self._connections) if pipeline != self.known.pipeline else ():
            if self.known.pipeline.model != pipeline.model:
                fleet.cancel(request)
            elif (reason := refusal(request, pipeline, self.adapters.list)) is not None:
                fleet.give_up(request, f"the pipeline that serves now cannot: {reason.message}")

    def _tell_adapters(self, entries: list[AdapterEntry]) -> None:
        for frontend in self._frontends:
            frontend.note_adapters(entries)

    def close(self) -> None:
        """Refuses submissions from now on, as UNAVAILABLE. Requests in the pool stay there."""
        self._is_open = False
        for frontend in self._frontends:
            frontend.close()
        self._tell_sleep(self._frontends)

    def note_sleep(self, state: SleepState) -> None:
        """Sets the state that the model has while no pipeline serves, and sends it to frontends if
        no pipeline serves now."""
        if state != self.known.sleep_state:
            self.known.sleep_state = state
            self._tell_sleep(self._frontends)

    def _tell_sleep(self, frontends: Iterable[FrontendStream]) -> None:
        if not self._is_open and (sleep := self.known.sleep) is not None:
            for frontend in frontends:
                frontend.note_sleep(sleep)

    def note_shortfall(self, text: str) -> None:
        """Sends frontends `text`, the reason why there is no pipeline. Does nothing while a
        pipeline serves, while the model is asleep, or if the reason has not changed."""
        if self._is_open or self.is_asleep or text == self.shortfall:
            return
        self.shortfall = text
        for frontend in self._frontends:
            frontend.note_shortfall(text)

    def deliver(self, updates: Iterable[Update]) -> None:
        """Puts each update of an iteration into the outbox of the frontend that owns the
        request."""
        now, has_ended = self._now(), False
        for frontend in self._frontends:
            frontend.check_unsent()
        connections = self._connections
        delivered: defaultdict[FrontendStream, list[Update]] = defaultdict(list)
        for update in updates:
            request, token_id, reason, n_generated, _, _ = update
            delivered[connections[request]].append(update)
            if token_id is not None:
                if request.account is not None:
                    request.account.charge(1, now)
                # A request that has its very first token may have been preempted since.
                if n_generated == 1 or request.n_tokens - request.n_prefill_tokens == 1:
                    self._note_first_token(request, n_generated)
            if reason is not None:
                self._note_end(request, reason, update.message)
                has_ended = True
        for connection, its_updates in delivered.items():
            connection.update(its_updates)
        if has_ended:
            for frontend in self._frontends:
                frontend.note_room()

    def suspend(
        self, begun: Iterable[Request], ended: Iterable[Update], *, is_open: bool = False
    ) -> None:
        """Reports to the frontends that the requests of a lost or late pipeline wait. `begun` are
        the requests that had begun. `ended` are updates of requests that end instead of waiting.
        `is_open` says that other pipelines serve and take the requests over. Without another
        pipeline, submissions are refused until the next one serves, and requests that had not begun
        wait for it, too."""
        begun = list(begun)
        suspended: Iterable[Request] = begun
        if not is_open:
            self.close()
            suspended = self._connections
        for request in suspended:
            if (frontend := self._connections.get(request)) is not None:
                frontend.suspend(request)
        for request in begun:
            self._observer.suspended(request)
        self.deliver(ended)

    def resign(self, message: str) -> None:
        """Ends every request as UNAVAILABLE, and then the streams of all frontends. The frontends
        look for the next leader at once."""
        self._is_leading = self._is_open = False
        self.adapters.close()
        for request in self._connections:
            self._observer.failed(request)
        self._connections.clear()
        for frontend in self._frontends:
            frontend.end(message)

    async def Connect(self, context: Any) -> None:
        """Serves one frontend until the frontend disconnects or this scheduler resigns.

        Raises:
            Unavailable: this scheduler does not lead, or the frontend does not read.
            PoolFull: there are too many frontends.
            InvalidRequest: the frontend sent the id of a request or of a command that is too long.
        """
        if not self._is_leading:
            raise Unavailable("this scheduler is not the leader")
        self._frontend_places.take()
        await context.send_initial_metadata(())  # tells the frontend that this scheduler leads
        connection = FrontendStream(self._n_free)
        if entries := self.adapters.list.entries:
            connection.note_adapters(entries)
        if self._is_open:
            connection.open(self.known.pipeline)
        elif self.shortfall:
            connection.note_shortfall(self.shortfall)
        self._tell_sleep((connection,))
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
                log.warning(
                    "a frontend does not read, and is cut off: %s", of_grpc_peer(context.peer())
                )
                raise Unavailable("this frontend does not read")
            elif isinstance(error, Exception):
                raise error

    def _note_first_token(self, request: Request, n_generated: int) -> None:
        """Notes that a request has its first token after its last admission. `n_generated` is the
        number of tokens in the output, including this one."""
        self._observer.first_token(request)
        self._connections[request].note_build(
            request,
            is_new=n_generated == 1 or request.left_build is not None,
            traits_of=lambda build: self._traits.get(build, {}),
        )

    def _note_end(self, request: Request, reason: FinishReason, message: str) -> None:
        del self._connections[request]
        if reason is FinishReason.FAILED:
            log.error("request %s fails: %s", request.request_id, message)
        self._observer.ended(request, reason)

    def _n_free(self) -> int | None:
        return self._fleet.n_free if self._is_open else None

    async def _read(self, connection: FrontendStream, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self._take(connection, message)

    def _take(self, connection: FrontendStream, message: scheduler_pb2.ConnectRequest) -> None:
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
                self._fleet.cancel(request)

        elif message.HasField("adapters"):
            self.adapters.merge(from_proto(message.adapters))
        elif message.HasField("adapter_command"):
            self._command(connection, message.adapter_command)
        elif message.HasField("demand") and not self._is_open:
            connection.n_held = message.demand.n_requests

    def _command(self, connection: FrontendStream, command: scheduler_pb2.AdapterCommand) -> None:
        if len(command.command_id) > MAX_REQUEST_ID_LENGTH:
            raise InvalidRequest("command_id", f"exceeds {MAX_REQUEST_ID_LENGTH} characters")
        self.adapters.carry_out(command, partial(connection.answer, command.command_id))

    def _submit(self, connection: FrontendStream, submission: scheduler_pb2.Submission) -> None:
        if not self._is_open:
            raise Unavailable("the scheduler takes no requests at the moment")
        if submission.request_id in connection.requests:
            raise InvalidRequest("request_id", f"{submission.request_id!r} is in use")
        sampling = check_submission(submission, self.known.pipeline, self.adapters.list)
        now = self._now()
        account = self._account_of(submission, now)
        pooling = pooling_in(self.known.pipeline.traits)
        request = to_request(
            submission,
            sampling,
            account=account,
            now=now,
            runs_whole=pooling is not None and pooling.runs_whole,
        )
        wait_s = 0.0 if submission.is_resubmitted else self._control.check(request, now)
        self._fleet.submit(request)
        self._control.note_submitted(request, wait_s, now)
        if account is not None and not submission.is_resubmitted:
            account.charge(request.n_prompt_tokens, now)
        self._connections[request] = connection
        connection.accept(
            request,
            submission.number if submission.HasField("number") else None,
            wants_traits=submission.wants_traits,
        )
        self._observer.submitted(request, submission)

    def _account_of(self, submission: scheduler_pb2.Submission, now: float) -> AccountUse | None:
        """Returns the account of a request, after a check that the account has room for the
        request. Returns None if the request has no account."""
        if not submission.HasField("account"):
            return None
        account = self._accounts.find(submission.account.name, account_limits(submission), now)
        if not submission.is_resubmitted:
            n_tokens = len(submission.prompt_token_ids) + submission.max_new_tokens
            account.check(n_tokens, now)
        return account

    def _cancel_all(self, connection: FrontendStream) -> None:
        for request in list(connection.requests.values()):
            self._fleet.cancel(request)


async def _write(connection: FrontendStream, context: Any) -> None:
    """Sends the messages for a frontend until the last one is sent.

    Raises:
        TimeoutError: the frontend did not read a message within `SEND_LIMIT_S`.
    """
    loop = asyncio.get_running_loop()
    sent_at = 0.0
    async with asyncio.timeout(None) as limit:
        while not connection.has_ended:
            limit.reschedule(None)
            message = await connection.next_message(not_before=sent_at + MESSAGE_PERIOD_S)
            sent_at = loop.time()
            limit.reschedule(sent_at + SEND_LIMIT_S)
            await context.write(message)
