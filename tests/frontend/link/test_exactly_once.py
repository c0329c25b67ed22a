"""A frontend's link and a scheduler's service, with pipelines and leaders that are lost anywhere:
each position of each request is delivered once, with the token that belongs there.

Nothing here waits: the machine carries every message by hand, and what is not carried when a leader
is lost never arrives.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from orcinus.v1 import scheduler_pb2

from services.common.sampling import SamplingParams
from services.common.sampling_proto import to_proto
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.link.scheduler_events import Event, Failed, OutputTokens
from services.frontend.link.scheduler_stream import SchedulerStream
from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import MAX_LOSSES
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.fleet import Fleet
from services.scheduler.frontend_stream import FrontendStream
from services.scheduler.observing.iteration_observer import IterationObservers
from services.scheduler.observing.request_observer import RequestObservers
from services.scheduler.service import SchedulerService
from services.scheduler.serving_loop import ServingLoop
from tests.fake_scheduler import PIPELINE
from tests.fakes import FakeEngine

STOP = 1
FAR_FUTURE = 1e9


def token_at(request_id: str, position: int) -> int:
    """Returns the token that an undisturbed run has there; one in a few ends the request."""
    return STOP + (sum(request_id.encode()) * 7 + position * 13) % 11


def undisturbed(submission: scheduler_pb2.Submission) -> list[int]:
    """Returns the whole output of an undisturbed run."""
    tokens: list[int] = []
    while len(tokens) < submission.max_new_tokens and STOP not in tokens:
        position = len(submission.prompt_token_ids) + len(tokens)
        tokens.append(token_at(submission.request_id, position))
    return tokens


class HandStream(SchedulerStream):
    """A stream whose messages wait until somebody carries them."""

    def __init__(self) -> None:
        super().__init__("nowhere", lambda *_: None)  # type: ignore[arg-type]

    @property
    def has_messages(self) -> bool:
        return not self._outbox.empty()

    def take(self) -> scheduler_pb2.ConnectRequest:
        return scheduler_pb2.ConnectRequest.FromString(self._outbox.get_nowait())


@dataclass
class Leadership:
    """A scheduler that leads, its one frontend, and its pipeline if there is one."""

    service: SchedulerService = field(default_factory=lambda: SchedulerService(RequestObservers()))
    pool: RequestPool = field(default_factory=lambda: RequestPool(max_requests=100))
    connection: FrontendStream = field(default_factory=FrontendStream)
    scheduler: Scheduler | None = None
    in_flight: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.service.lead()
        self.service._frontends.add(self.connection)

    def open(self, *, depth: int, hand_off: bool) -> None:
        self.scheduler = Scheduler(
            self.pool,
            KVManager(n_blocks=12, block_size=4),
            policy=ChunkedPolicy(max_batch_size=3, max_batch_tokens=8),
            pipeline_depth=depth,
            token_hand_off=hand_off,
        )
        loop = ServingLoop(
            self.scheduler,
            FakeEngine(asyncio.Event()),
            deliver=self.service.deliver,
            iterations=IterationObservers(),
            requests=RequestObservers(),
            has_news=asyncio.Event(),
        )
        fleet = Fleet(self.pool)
        fleet.open(0, loop)
        self.service.open(PIPELINE, fleet)
        loop.adopt()

    def lose_pipeline(self) -> None:
        assert self.scheduler is not None
        self.service.suspend(*self.scheduler.suspend())
        self.in_flight.clear()
        self.scheduler = None

    def select(self) -> None:
        if self.scheduler is not None and (batch := self.scheduler.select()) is not None:
            self.in_flight.append(batch)

    def return_oldest(self) -> None:
        if self.scheduler is not None and self.in_flight:
            batch = self.in_flight.pop(0)
            tokens = [_sampled(span) for span in batch.spans if span.is_sampled]
            self.service.deliver(self.scheduler.apply(batch.iteration, tokens))


def _sampled(span: Span) -> int:
    return token_at(span.request.request_id, span.start_position + span.n_tokens)


@dataclass
class Client:
    """A request as its client sees it."""

    submission: scheduler_pb2.Submission
    expected: list[int]
    inbox: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    is_cancelled: bool = False

    def take_in(self) -> None:
        while not self.inbox.empty():
            event = self.inbox.get_nowait()
            assert not self.is_cancelled
            assert not self.ends
            if isinstance(event, OutputTokens):
                assert event.start == len(self.tokens)
                self.tokens += event.token_ids
            elif event.is_last:
                self.ends.append(event)


class ExactlyOnce(RuleBasedStateMachine):
    """Losses between, before and after everything that may happen to a request."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clients: list[Client] = []
        self.n_losses = 0
        self.do(self._begin)

    def do(self, step: Callable[[], Awaitable[None] | None]) -> None:
        async def run() -> None:
            waiting = step()
            if waiting is not None:
                await waiting

        self.runner.run(run())

    def _begin(self) -> None:
        self.link = SchedulerClient("nowhere", resume_s=FAR_FUTURE)
        self._follow(Leadership())

    def _follow(self, leadership: Leadership) -> None:
        self.leadership = leadership
        self.stream = HandStream()
        self.link._stream = self.stream

    @rule(n_prompt=st.integers(1, 9), n_new=st.integers(1, 12))
    def submit(self, n_prompt: int, n_new: int) -> None:
        submission = scheduler_pb2.Submission(
            request_id=f"r{len(self.clients)}",
            prompt_token_ids=[2] * n_prompt,
            max_new_tokens=n_new,
            sampling=to_proto(SamplingParams(temperature=0, stop_token_ids=(STOP,))),
        )
        client = Client(submission, undisturbed(submission))
        self.clients.append(client)
        self.do(
            lambda: self.link.submit(
                submission, client.inbox, model=PIPELINE.model, until=FAR_FUTURE
            )
        )

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        client.is_cancelled = True
        self.do(lambda: self.link.cancel(client.submission.request_id))

    @rule()
    def carry_up(self) -> None:
        if self.stream.has_messages:
            message = self.stream.take()
            leadership = self.leadership
            self.do(lambda: leadership.service._take(leadership.connection, message))

    @rule()
    def carry_down(self) -> None:
        connection = self.leadership.connection
        if connection._has_mail.is_set():

            async def carry() -> None:
                self.link._apply(await connection.next_message())

            self.do(carry)

    @rule()
    def try_again(self) -> None:
        for request in list(self.link._requests.values()):
            if request.is_held:
                self.do(lambda request=request: self.link._attempt(request))  # type: ignore[misc]

    @rule()
    def iterate(self) -> None:
        self.do(self.leadership.select)

    @rule()
    def come_back(self) -> None:
        self.do(self.leadership.return_oldest)

    @precondition(lambda self: self.leadership.scheduler is None)
    @rule(depth=st.integers(1, 3), hand_off=st.booleans())
    def form(self, depth: int, hand_off: bool) -> None:
        self.do(lambda: self.leadership.open(depth=depth, hand_off=hand_off))

    @precondition(lambda self: self.leadership.scheduler is not None)
    @rule()
    def lose_pipeline(self) -> None:
        self.n_losses += 1
        self.do(self.leadership.lose_pipeline)

    @rule()
    def lose_leader(self) -> None:
        self.do(self.link._lose)
        self._follow(Leadership())

    @invariant()
    def delivered_is_a_beginning_of_the_undisturbed_run(self) -> None:
        for client in self.clients:
            if not client.is_cancelled:
                client.take_in()
                assert client.tokens == client.expected[: len(client.tokens)]

    def teardown(self) -> None:
        """Lets everything that is left come to its end."""
        if self.leadership.scheduler is None:
            self.form(2, False)
        for _ in range(60 * (1 + len(self.clients))):
            self.carry_up()
            self.carry_down()
            self.try_again()
            self.iterate()
            self.come_back()
        self.delivered_is_a_beginning_of_the_undisturbed_run()
        for client in self.clients:
            if client.is_cancelled:
                continue
            (end,) = client.ends
            if isinstance(end, Failed):
                assert self.n_losses >= MAX_LOSSES
            else:
                assert client.tokens == client.expected
        assert len(self.leadership.pool) == 0
        scheduler = self.leadership.scheduler
        assert scheduler is not None
        assert scheduler.kv_manager.n_reserved_slots == 0
        self.runner.close()


ExactlyOnce.TestCase.settings = settings(
    max_examples=settings().max_examples // 2, stateful_step_count=60, deadline=None
)
test_exactly_once = ExactlyOnce.TestCase
