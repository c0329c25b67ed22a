"""A scheduler that does what a test tells it to. Its gRPC is real, but it has no pool, no pipeline
and no clock.

    scheduler = FakeScheduler()
    address = await scheduler.start()
    scheduler.behaviour = says(5, 6, 7)

The scheduler leads from the start, unless `is_leading` is False. While it does not lead, its health
says so, and it refuses the streams of frontends. A behaviour is a coroutine function that answers
one request. It runs as a task of its own. The task is cancelled if the request is cancelled or the
frontend disconnects. `requests` has all requests so far, in order. `cancellations` has the ids of
all requests that frontends have cancelled, even if the requests had ended.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
from orcinus.v1 import logprobs_pb2, scheduler_pb2

from services.common import errors, rpc, rpc_handlers
from services.common.adapter_list import AdapterList
from services.common.adapter_list_proto import from_proto, to_proto
from services.common.health import Health
from tests import fake_watch
from tests.fake_watch import FakeWatch

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]

PIPELINE = scheduler_pb2.PipelineDescription(
    model="test-model",
    vocab_size=512,
    max_model_len=128,
    eos_token_ids=[1],
    n_stages=2,
    tp_size=1,
    can_follow_grammars=True,
)


PROMPT_PIECE = 3
"""Number of prompt tokens whose log-probabilities are sent together, if the prompt is short."""


def logprob_of(token_id: int) -> float:
    """Returns the log-probability that a token has at every position at which it is generated."""
    return -(token_id % 7) / 4 - 0.25


def rank_of(token_id: int) -> int:
    """Returns the rank of a token by probability, from 1, at every position at which it is
    generated."""
    return token_id % 5 + 1


def tops_of(token_id: int, n_top: int) -> list[tuple[int, float]]:
    """Returns the `n_top` most likely tokens at the position of a token, with their
    log-probabilities. The token itself is among them if its rank is at most `n_top`."""
    ids = [(token_id + place) % PIPELINE.vocab_size for place in range(1, n_top + 1)]
    if rank_of(token_id) <= n_top:
        ids[rank_of(token_id) - 1] = token_id
    return [
        (other, logprob_of(other) if other == token_id else -place / 8)
        for place, other in enumerate(ids)
    ]


def logprobs_of(token_ids: Sequence[int], n_top: int) -> bytes:
    """Returns the log-probabilities of tokens, serialized as a rank serializes them."""
    tops = [top for token_id in token_ids for top in tops_of(token_id, n_top)]
    return logprobs_pb2.Logprobs(
        logprobs=map(logprob_of, token_ids),
        ranks=map(rank_of, token_ids),
        top_token_ids=[token_id for token_id, _ in tops],
        top_logprobs=[value for _, value in tops],
    ).SerializeToString()


def sha256(text: str) -> str:
    """Returns the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


class FakeRequest:
    """A request that a frontend has submitted, and methods with which a behaviour answers it."""

    def __init__(
        self,
        submission: scheduler_pb2.Submission,
        send: Callable[[scheduler_pb2.ConnectResponse], None],
    ) -> None:
        self.submission = submission
        self.request_id = submission.request_id
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when the request is cancelled, has finished, or has lost its frontend."""
        self.n_tokens = len(submission.generated_token_ids)
        self.n_cached_tokens = 0
        self._number = submission.number
        self._has_logprobs = submission.HasField("n_logprobs")
        self._send = send

    def accept(self) -> None:
        """Tells the frontend that the request is in the pool."""
        accepted = scheduler_pb2.Acceptance(request_id=self.request_id)
        self._send(scheduler_pb2.ConnectResponse(accepted=[accepted]))

    def built_by(self, build: str, **traits: str) -> None:
        """Tells the frontend which build of the workers makes the tokens of the request from now
        on."""
        built = scheduler_pb2.RequestBuild(request_id=self.request_id, build=build, traits=traits)
        self._send(scheduler_pb2.ConnectResponse(builds=[built]))

    def reject(
        self,
        reason: scheduler_pb2.RejectionReason,
        message: str = "",
        *,
        field: str = "",
        retry_after_s: float | None = None,
        account_s: float | None = None,
    ) -> None:
        """Refuses the request."""
        rejected = scheduler_pb2.Rejection(
            request_id=self.request_id, reason=reason, message=message, field=field
        )
        if retry_after_s is not None:
            rejected.retry_after.FromNanoseconds(int(retry_after_s * 1e9))
        if account_s is not None:
            rejected.account_time.FromNanoseconds(int(account_s * 1e9))
        self._send(scheduler_pb2.ConnectResponse(rejected=[rejected]))

    def tokens(self, *token_ids: int) -> None:
        """Sends the new tokens of an iteration. They are sent in columns, unless they are the first
        tokens of the request or have log-probabilities."""
        if not self.n_tokens or self._has_logprobs:
            self._send(scheduler_pb2.ConnectResponse(tokens=[self._update(token_ids)]))
            return
        columns = scheduler_pb2.TokenColumns(
            numbers=[self._number],
            starts=[self.n_tokens],
            n_tokens=[len(token_ids)],
            token_ids=token_ids,
        )
        self.n_tokens += len(token_ids)
        self._send(scheduler_pb2.ConnectResponse(columns=columns))

    def complete(self, reason: scheduler_pb2.CompletionReason, message: str = "") -> None:
        """Ends the request."""
        completion = scheduler_pb2.Completion(
            request_id=self.request_id, reason=reason, message=message
        )
        self._send(scheduler_pb2.ConnectResponse(completed=[completion]))

    def last_token(self, token_id: int, reason: scheduler_pb2.CompletionReason) -> None:
        """Sends the last token and the end of the request in one message."""
        completion = scheduler_pb2.Completion(request_id=self.request_id, reason=reason)
        update = self._update([token_id])
        self._send(scheduler_pb2.ConnectResponse(tokens=[update], completed=[completion]))

    def vector(self, values: bytes) -> None:
        """Sends the embedding of the prompt, and ends the request."""
        update = scheduler_pb2.TokenUpdate(request_id=self.request_id, start=0, vector=values)
        reason = scheduler_pb2.COMPLETION_REASON_LENGTH
        completion = scheduler_pb2.Completion(request_id=self.request_id, reason=reason)
        self._send(scheduler_pb2.ConnectResponse(tokens=[update], completed=[completion]))

    def suspend(self, n_losses: int) -> None:
        """Tells the frontend that the pipeline is lost and the request waits for the next one."""
        suspension = scheduler_pb2.Suspension(request_id=self.request_id, n_losses=n_losses)
        self._send(scheduler_pb2.ConnectResponse(suspended=[suspension]))

    def _update(self, token_ids: Sequence[int]) -> scheduler_pb2.TokenUpdate:
        start, self.n_tokens = self.n_tokens, self.n_tokens + len(token_ids)
        update = scheduler_pb2.TokenUpdate(
            request_id=self.request_id,
            token_ids=token_ids,
            start=start,
            n_cached_tokens=self.n_cached_tokens,
        )
        if self.submission.HasField("n_logprobs"):
            update.logprobs = logprobs_of(token_ids, self.submission.n_logprobs)
        if self.submission.HasField("n_prompt_logprobs") and not start:
            prompt, n_top = self.submission.prompt_token_ids, self.submission.n_prompt_logprobs
            n_at_once = max(PROMPT_PIECE, len(prompt) // 8)
            for position in range(1, len(prompt), n_at_once):
                data = logprobs_of(prompt[position : position + n_at_once], n_top)
                update.prompt_logprobs.add(position=position, logprobs=data)
        return update


Behaviour = Callable[[FakeRequest], Awaitable[None]]


def finds(n_cached_tokens: int, behave: Behaviour) -> Behaviour:
    """Returns the behaviour `behave`, with `n_cached_tokens` tokens of the prompt found in the
    cache."""

    async def behave_cached(request: FakeRequest) -> None:
        request.n_cached_tokens = n_cached_tokens
        await behave(request)

    return behave_cached


def says(*token_ids: int) -> Behaviour:
    """Returns a behaviour that generates these tokens, one in each iteration, and then ends as a
    real scheduler does. Tokens that the request already has are not sent again."""

    async def behave(request: FakeRequest) -> None:
        request.accept()
        sampling = request.submission.sampling
        for n_tokens, token_id in enumerate(token_ids, start=1):
            if n_tokens <= len(request.submission.generated_token_ids):
                continue
            if token_id in sampling.stop_token_ids and n_tokens > sampling.min_tokens:
                request.last_token(token_id, scheduler_pb2.COMPLETION_REASON_STOP)
                return
            if n_tokens in (request.submission.max_new_tokens, len(token_ids)):
                request.last_token(token_id, scheduler_pb2.COMPLETION_REASON_LENGTH)
                return
            request.tokens(token_id)
            await asyncio.sleep(0)

    return behave


async def echo(request: FakeRequest) -> None:
    """Generates the tokens of the prompt, again and again, until `max_new_tokens` is reached."""
    prompt = list(request.submission.prompt_token_ids)
    n_tokens = request.submission.max_new_tokens
    await says(*(prompt * n_tokens)[:n_tokens])(request)


async def keeps_quiet(request: FakeRequest) -> None:
    """Accepts the request and never runs it."""
    request.accept()


def stalls_after(*token_ids: int) -> Behaviour:
    """Returns a behaviour that generates these tokens and then nothing more, like a pipeline that
    hangs."""

    async def behave(request: FakeRequest) -> None:
        request.accept()
        for token_id in token_ids:
            request.tokens(token_id)

    return behave


def rejects(
    reason: scheduler_pb2.RejectionReason,
    message: str = "",
    *,
    field: str = "",
    retry_after_s: float | None = None,
) -> Behaviour:
    """Returns a behaviour that refuses the request."""

    async def behave(request: FakeRequest) -> None:
        request.reject(reason, message, field=field, retry_after_s=retry_after_s)

    return behave


def loses_pipeline_after(*token_ids: int) -> Behaviour:
    """Returns a behaviour that generates these tokens, and then ends the request because the
    pipeline is lost."""

    async def behave(request: FakeRequest) -> None:
        await stalls_after(*token_ids)(request)
        request.complete(scheduler_pb2.COMPLETION_REASON_UNAVAILABLE, "stage 1 was lost")

    return behave


class FakeScheduler:
    """A `SchedulerService` whose requests do what `behaviour` says."""

    def __init__(
        self,
        behaviour: Behaviour = echo,
        *,
        pipeline: scheduler_pb2.PipelineDescription | None = PIPELINE,
        is_leading: bool = True,
        watch: FakeWatch | None = None,
    ) -> None:
        self.watch = watch
        """The watch service of this scheduler. Without it, no client can watch."""
        self.behaviour = behaviour
        self.pipeline = pipeline
        """Description of the pipeline, which is sent to frontends that connect. Nothing is sent if
        it is None."""
        self.sleep: scheduler_pb2.Sleep | None = None
        """Message that is sent to frontends that connect while there is no pipeline, or None."""
        self.adapters = AdapterList()
        """The adapters that frontends have loaded or reported."""
        self.adapter_failure = ""
        """Reason why the scheduler refuses to load adapters. Empty if it loads them."""
        self.demands: list[int] = []
        """Numbers of held requests that frontends have reported, in order."""
        self.n_free: int | None = None
        """Number of free places in the pool that each message reports. Messages report none if it
        is None."""
        self.requests: list[FakeRequest] = []
        self.cancellations: list[str] = []
        self.n_connections = 0
        self.address = ""
        """Address at which the scheduler listens, as host:port. Empty before `start`."""
        self._is_leading = is_leading
        self._connections: set[_Connection] = set()
        self._health = Health(SERVICE.full_name)
        self._arrivals = asyncio.Condition()
        self._drop = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Starts to serve at `address`. Returns the address, with the port that was chosen."""
        self._server = rpc.create_server()
        handler = rpc_handlers.service_handler(SERVICE, self)
        self._server.add_generic_rpc_handlers((handler,))
        if self.watch is not None:
            watched = rpc_handlers.service_handler(fake_watch.SERVICE, self.watch)
            self._server.add_generic_rpc_handlers((watched,))
        self._health.add_to(self._server)
        self.address = rpc.bind(self._server, address)
        await self._health.start()
        await self._health.set_serving(self._is_leading)
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Closes all connections and stops the server."""
        self.drop_connections()
        if self._server is not None:
            await self._server.stop(None)
            await self._server.wait_for_termination()

    async def lead(self) -> None:
        """Begins to lead: the scheduler accepts the streams of frontends."""
        self._is_leading = True
        await self._health.set_serving(True)

    async def stand_by(self) -> None:
        """Stops leading: ends the streams of all frontends and refuses new ones."""
        self._is_leading = False
        await self._health.set_serving(False)
        for connection in list(self._connections):
            await connection.wait_sent()
        self.drop_connections()

    def open(self, pipeline: scheduler_pb2.PipelineDescription = PIPELINE) -> None:
        """Opens a pipeline, and tells all frontends."""
        self.pipeline = pipeline
        for connection in self._connections:
            connection.send(scheduler_pb2.ConnectResponse(pipeline=pipeline))

    def close(self, shortfall: str = "") -> None:
        """Closes the pipeline, and tells all frontends the reason. Running requests continue."""
        self.pipeline = None
        for connection in self._connections:
            connection.send(scheduler_pb2.ConnectResponse(is_closed=True, shortfall=shortfall))

    def note_sleep(self, state: scheduler_pb2.SleepState) -> None:
        """Removes the pipeline, and tells all frontends that the model sleeps or is being
        started."""
        self.pipeline = None
        self.sleep = scheduler_pb2.Sleep(state=state, pipeline=PIPELINE)
        for connection in self._connections:
            connection.send(scheduler_pb2.ConnectResponse(is_closed=True, sleep=self.sleep))

    async def note_demand(self, n_requests: int) -> None:
        """Records that a frontend has reported `n_requests` held requests."""
        async with self._arrivals:
            self.demands.append(n_requests)
            self._arrivals.notify_all()

    async def wait_demand(self, n_requests: int) -> None:
        """Waits until the last number of held requests that was reported is `n_requests`."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: self.demands[-1:] == [n_requests])

    async def wait_ended(self) -> None:
        """Waits until all requests so far have ended."""
        for request in self.requests:
            await request.ended.wait()

    def drop_connections(self) -> None:
        """Ends the streams of all frontends, which may connect again."""
        self._drop.set()
        self._drop = asyncio.Event()

    async def wait_requests(self, n_requests: int = 1) -> list[FakeRequest]:
        """Waits until there have been at least `n_requests` requests, and returns all requests so
        far."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: len(self.requests) >= n_requests)
        return self.requests

    async def wait_connections(self, n_connections: int) -> None:
        """Waits until frontends have connected at least `n_connections` times."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: self.n_connections >= n_connections)

    async def Connect(self, context: Any) -> None:
        """Handles the stream of one frontend."""
        if not self._is_leading:
            raise errors.Unavailable("this scheduler does not lead")
        await context.send_initial_metadata(())
        connection = _Connection(self)
        self._connections.add(connection)
        async with self._arrivals:
            self.n_connections += 1
            self._arrivals.notify_all()
        drop = asyncio.ensure_future(self._drop.wait())
        tasks = [
            drop,
            asyncio.ensure_future(connection.write_all(context)),
            asyncio.ensure_future(connection.read_all(context)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._connections.discard(connection)
            connection.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    def obey(self, command: scheduler_pb2.AdapterCommand) -> scheduler_pb2.ConnectResponse:
        """Loads or unloads an adapter, unless `adapter_failure` is set. Returns the answer for the
        frontend."""
        outcome = scheduler_pb2.AdapterOutcome.ADAPTER_OUTCOME_DONE
        if self.adapter_failure:
            outcome = scheduler_pb2.AdapterOutcome.ADAPTER_OUTCOME_INVALID
        elif command.source:
            self.adapters.put(command.name, command.source, sha256(command.source))
        else:
            self.adapters.remove(command.name)
        answer = scheduler_pb2.AdapterAnswer(
            command_id=command.command_id,
            outcome=outcome,
            message=self.adapter_failure,
            field="lora_path",
        )
        return scheduler_pb2.ConnectResponse(
            adapters=to_proto(self.adapters.entries), adapter_answers=[answer]
        )

    async def submit(self, submission: scheduler_pb2.Submission, connection: "_Connection") -> None:
        """Records a new request and starts its behaviour."""
        request = FakeRequest(submission, connection.send)
        connection.start(request, self.behaviour(request))
        async with self._arrivals:
            self.requests.append(request)
            self._arrivals.notify_all()


class _Connection:
    """The stream of one frontend, as the scheduler sees it."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self._scheduler = scheduler
        self._outbox: asyncio.Queue[scheduler_pb2.ConnectResponse] = asyncio.Queue()
        self._running: dict[str, tuple[FakeRequest, asyncio.Future[None]]] = {}
        if scheduler.pipeline is not None:
            self.send(scheduler_pb2.ConnectResponse(pipeline=scheduler.pipeline))
        elif scheduler.sleep is not None:
            self.send(scheduler_pb2.ConnectResponse(sleep=scheduler.sleep))

    def send(self, response: scheduler_pb2.ConnectResponse) -> None:
        if self._scheduler.n_free is not None:
            response.n_free = self._scheduler.n_free
        self._outbox.put_nowait(response)
        for completed in response.completed:
            self._end(completed.request_id)
        for rejected in response.rejected:
            self._end(rejected.request_id)

    def start(self, request: FakeRequest, behaviour: Awaitable[None]) -> None:
        self._running[request.request_id] = (request, asyncio.ensure_future(behaviour))

    async def write_all(self, context: Any) -> None:
        while True:
            await context.write(await self._outbox.get())
            self._outbox.task_done()

    async def wait_sent(self) -> None:
        await self._outbox.join()

    async def read_all(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("submission"):
                await self._scheduler.submit(message.submission, self)
            elif message.HasField("demand"):
                await self._scheduler.note_demand(message.demand.n_requests)
            elif message.HasField("adapters"):
                self._scheduler.adapters.merge(from_proto(message.adapters))
            elif message.HasField("adapter_command"):
                self.send(self._scheduler.obey(message.adapter_command))
            else:
                self._cancel(message.cancellation.request_id)

    def close(self) -> None:
        for request, task in self._running.values():
            task.cancel()
            request.ended.set()
        self._running.clear()

    def _end(self, request_id: str) -> None:
        if request_id in self._running:
            self._running.pop(request_id)[0].ended.set()

    def _cancel(self, request_id: str) -> None:
        self._scheduler.cancellations.append(request_id)
        if request_id not in self._running:
            return  # it ended a moment ago
        request, task = self._running[request_id]
        task.cancel()
        request.cancelled.set()
        request.complete(scheduler_pb2.COMPLETION_REASON_CANCELLED)
