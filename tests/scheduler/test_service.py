"""SchedulerService over a real socket, with the real serving loop and an engine that a test
drives."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio
import pytest
from orcinus.v1 import sampling_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from prometheus_client import CollectorRegistry

from services.common import rpc, rpc_handlers
from services.common.adapters import adapter_traits
from services.common.errors import Unavailable
from services.common.sampling import MAX_GRAMMAR_LENGTH, SamplingParams
from services.common.sampling_proto import from_proto
from services.scheduler.core.admission.admission_control import AdmissionControl, TooLate
from services.scheduler.core.admission.no_control import NO_CONTROL, NoControl
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.fleet import Fleet
from services.scheduler.frontend_stream import MAX_LOGPROB_BYTES, UPDATE_BYTES
from services.scheduler.observing.iteration_observer import IterationObservers
from services.scheduler.observing.request_metrics import RequestMetrics
from services.scheduler.observing.request_observer import RequestObserver, RequestObservers
from services.scheduler.pipeline.pipeline_lost import PipelineLost
from services.scheduler.service import SchedulerService
from services.scheduler.serving_loop import ServingLoop
from tests.exposition import Samples
from tests.fakes import FakeEngine
from tests.limits import HANG_S
from tests.scheduler.core.workload import build

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
STOP = 9
ADAPTERS = adapter_traits({"one": "1" * 64, "two": "2" * 64})
ONE, TWO, OTHER = (
    scheduler_pb2.Adapter(name=name, digest=digest * 64)
    for name, digest in (("one", "1"), ("two", "2"), ("one", "3"))
)


@dataclass
class World:
    """A scheduler with a socket in front and a scripted engine behind."""

    address: str
    scheduler: Scheduler
    engine: FakeEngine
    service: SchedulerService
    loop: ServingLoop
    fleet: Fleet
    serving: asyncio.Task[None]


@contextlib.asynccontextmanager
async def world(
    *,
    pipeline_depth: int = 1,
    n_blocks: int = 16,
    max_frontends: int = 32,
    now: Callable[[], float] = time.monotonic,
    order: Order | None = None,
    has_prefix_cache: bool = False,
    expected_use: ExpectedUse | None = None,
    observer: RequestObserver | None = None,
    control: AdmissionControl | NoControl = NO_CONTROL,
) -> AsyncIterator[World]:
    scheduler = build(
        max_batch_size=4,
        n_blocks=n_blocks,
        block_size=4,
        pipeline_depth=pipeline_depth,
        order=order,
        has_prefix_cache=has_prefix_cache,
        expected_use=expected_use,
    )
    has_news = asyncio.Event()
    engine = FakeEngine(has_news)
    description = scheduler_pb2.PipelineDescription(
        model="fake", vocab_size=100, max_model_len=64, eos_token_ids=[STOP], traits=ADAPTERS
    )
    requests = RequestObservers(*() if observer is None else (observer,))
    service = SchedulerService(requests, control=control, max_frontends=max_frontends, now=now)
    loop = ServingLoop(
        scheduler,
        engine,
        deliver=service.deliver,
        iterations=IterationObservers(),
        requests=requests,
        has_news=has_news,
        now=now,
    )
    fleet = Fleet(scheduler.pool)
    fleet.open(0, loop)
    service.lead()
    service.open(description, fleet)
    server = rpc.create_server()
    server.add_generic_rpc_handlers((rpc_handlers.service_handler(SERVICE, service),))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    serving = asyncio.create_task(loop.run())
    try:
        yield World(address, scheduler, engine, service, loop, fleet, serving)
    finally:
        serving.cancel()
        [ended] = await asyncio.gather(serving, return_exceptions=True)
        await server.stop(grace=0)
    assert ended is None or isinstance(ended, asyncio.CancelledError | PipelineLost)


class Frontend:
    """A client of Connect."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.connect(address)
        self._stream = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).Connect()

    async def __aenter__(self) -> "Frontend":
        assert (await self.read()).pipeline.model == "fake"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.hang_up()

    async def hang_up(self) -> None:
        self._stream.cancel()
        await self._channel.close()

    async def read(self) -> scheduler_pb2.ConnectResponse:
        message: scheduler_pb2.ConnectResponse = await asyncio.wait_for(self._stream.read(), HANG_S)
        return message

    async def has_ended(self) -> bool:
        """Returns whether the stream has ended in good order, once it has or brings more."""
        return await asyncio.wait_for(self._stream.read(), HANG_S) is grpc.aio.EOF

    async def read_on(self) -> None:
        """Reads until the stream ends."""
        while True:
            await self.read()

    async def submit(
        self,
        name: str,
        *,
        prompt: int = 3,
        max_new_tokens: int = 4,
        sampling: dict[str, Any] | None = None,
        account: scheduler_pb2.Account | None = None,
        is_resubmitted: bool = False,
        priority: int = 0,
        time_left: timedelta | None = None,
        **fields: Any,
    ) -> None:
        submission = scheduler_pb2.Submission(
            **fields,
            priority=priority,
            time_left=time_left,
            account=account,
            is_resubmitted=is_resubmitted,
            request_id=name,
            prompt_token_ids=[1] * prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling_pb2.SamplingParams(
                **{"temperature": 0, "seed": 3, "stop_token_ids": [STOP], **(sampling or {})}
            ),
        )
        await self.send(submission)

    async def send(self, submission: scheduler_pb2.Submission) -> None:
        await self._stream.write(scheduler_pb2.ConnectRequest(submission=submission))

    async def accepted(self, name: str, **options: Any) -> None:
        await self.submit(name, **options)
        assert [item.request_id for item in (await self.read()).accepted] == [name]

    async def cancel(self, name: str) -> None:
        cancellation = scheduler_pb2.Cancellation(request_id=name)
        await self._stream.write(scheduler_pb2.ConnectRequest(cancellation=cancellation))

    async def rejection(self, name: str, **options: Any) -> scheduler_pb2.Rejection:
        await self.submit(name, **options)
        [rejection] = (await self.read()).rejected
        assert rejection.request_id == name
        return rejection


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_tokens_of_an_iteration_come_as_one_message_until_the_stop_token() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a")
        await frontend.accepted("b", max_new_tokens=2)
        await it.engine.return_oldest(5)
        assert [t.request_id for t in (await frontend.read()).tokens] == ["a"]
        await it.engine.return_oldest(6)
        message = await frontend.read()
        assert [(t.request_id, list(t.token_ids)) for t in message.tokens] == [
            ("a", [6]),
            ("b", [6]),
        ]
        await it.engine.return_oldest(STOP)
        message = await frontend.read()
        assert [(c.request_id, c.reason) for c in message.completed] == [
            ("a", scheduler_pb2.COMPLETION_REASON_STOP),
            ("b", scheduler_pb2.COMPLETION_REASON_STOP),
        ]
        assert len(it.scheduler.pool) == 0


async def test_who_is_preempted_for_the_memory_of_others_is_counted_and_goes_on() -> None:
    use, registry = ExpectedUse(), CollectorRegistry()
    use.share = 0.0
    async with (
        world(n_blocks=3, expected_use=use, observer=RequestMetrics(registry)) as it,
        Frontend(it.address) as frontend,
    ):
        await frontend.accepted("a", prompt=4, max_new_tokens=6)
        await it.engine.return_oldest(5)
        assert [update.request_id for update in (await frontend.read()).tokens] == ["a"]
        await frontend.accepted("b", prompt=4, max_new_tokens=6)
        tokens: dict[str, list[int]] = {"a": [5], "b": []}
        ended: list[str] = []
        while len(ended) < 2:
            await it.engine.return_oldest(6)
            message = await frontend.read()
            for update in message.tokens:
                assert update.start == len(tokens[update.request_id])
                tokens[update.request_id] += update.token_ids
            ended += [completed.request_id for completed in message.completed]
        assert ended == ["a", "b"]
        assert [len(of_one) for of_one in tokens.values()] == [6, 6]
    samples = Samples.of(registry)
    assert samples.sum("orcinus_preemptions_total") == 1
    assert samples.sum("orcinus_requests_resumed_total") == 1


class FirstTokens(RequestObservers):
    """An observer that writes down whose first tokens have come."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def first_token(self, request: Request) -> None:
        self.names.append(request.request_id)


async def test_who_is_preempted_with_its_first_token_has_had_it() -> None:
    use, observer = ExpectedUse(), FirstTokens()
    use.share = 0.0
    async with (
        world(n_blocks=2, pipeline_depth=2, expected_use=use, observer=observer) as it,
        Frontend(it.address) as frontend,
    ):
        await frontend.accepted("a", prompt=4, max_new_tokens=4)
        await frontend.accepted("b", prompt=4, max_new_tokens=4)
        await it.engine.return_oldest(5)  # now "a" needs the memory of "b", which is in flight
        await it.engine.return_oldest(5)
        await until(lambda: it.scheduler.pool.n_running == 1)
        assert observer.names == ["a", "b"]


ANN, BOB = scheduler_pb2.Account(name="ann"), scheduler_pb2.Account(name="bob")


@pytest.mark.parametrize(
    ("first", "second", "n_cached"),
    [
        ({}, {}, 8),
        ({"cache_salt": "s"}, {"cache_salt": "s"}, 8),
        ({"cache_salt": "s"}, {}, 0),
        ({"cache_salt": "s"}, {"cache_salt": "t"}, 0),
        ({"account": ANN}, {"account": ANN}, 8),
        ({"account": ANN}, {"account": BOB}, 0),
        ({"account": ANN}, {"cache_salt": "ann"}, 0),
        ({"account": ANN}, {"cache_salt": "3:ann"}, 0),
        ({"adapter": ONE}, {"adapter": ONE}, 8),
        ({"adapter": ONE}, {"adapter": TWO}, 0),
        ({"adapter": ONE}, {}, 0),
        ({"adapter": ONE}, {"cache_salt": "1" * 64}, 0),
        ({"is_uncached": True}, {}, 0),
        ({}, {"is_uncached": True}, 0),
    ],
    ids=str,
)
async def test_what_a_cache_had_comes_with_the_first_token_of_who_may_have_it(
    first: dict[str, Any], second: dict[str, Any], n_cached: int
) -> None:
    async with world(has_prefix_cache=True) as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", prompt=10, **first)
        await it.engine.return_oldest(STOP)
        assert [update.n_cached_tokens for update in (await frontend.read()).tokens] == [0]
        await frontend.accepted("b", prompt=10, **second)
        await it.engine.return_oldest(5)
        assert [update.n_cached_tokens for update in (await frontend.read()).tokens] == [n_cached]
        await it.engine.return_oldest(STOP)
        assert [update.n_cached_tokens for update in (await frontend.read()).tokens] == [0]


async def test_log_probabilities_are_passed_on_in_messages_of_bounded_size() -> None:
    asking = scheduler_pb2.Submission(
        request_id="a",
        prompt_token_ids=[1] * 3,
        max_new_tokens=2,
        sampling=sampling_pb2.SamplingParams(seed=3),
        n_logprobs=2,
        n_prompt_logprobs=0,
    )
    large = [bytes([number]) * (MAX_LOGPROB_BYTES // 2 + 1) for number in range(5)]
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.send(asking)
        assert (await frontend.read()).accepted
        [request] = it.scheduler.pool
        assert (request.n_logprobs, request.n_prompt_logprobs) == (2, 0)
        brought = [
            worker_pb2.SpanLogprobs(span=0, prompt_position=1 + number, logprobs=data)
            for number, data in enumerate(large)
        ]
        brought.append(worker_pb2.SpanLogprobs(span=0, logprobs=b"sampled"))
        await it.engine.return_oldest(5, brought)
        pieces: list[tuple[int, bytes]] = []
        tokens: list[int] = []
        while not tokens:
            message = await frontend.read()
            assert message.ByteSize() < 2 * MAX_LOGPROB_BYTES
            for update in message.tokens:
                assert update.start == 0
                pieces += [(piece.position, piece.logprobs) for piece in update.prompt_logprobs]
                tokens += update.token_ids
        assert pieces == list(enumerate(large, start=1))
        assert tokens == [5]
        assert update.logprobs == b"sampled"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_logprobs": 21}, "logprobs"),
        ({"n_prompt_logprobs": 21}, "prompt_logprobs"),
    ],
    ids=str,
)
async def test_log_probabilities_beyond_the_limits_are_refused(
    fields: dict[str, int], named: str
) -> None:
    asking = scheduler_pb2.Submission(
        request_id="a",
        prompt_token_ids=[1] * 3,
        max_new_tokens=2,
        sampling=sampling_pb2.SamplingParams(seed=3),
    )
    for name, value in fields.items():
        setattr(asking, name, value)
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.send(asking)
        assert [r.field for r in (await frontend.read()).rejected] == [named]


async def test_each_message_says_how_many_places_are_free() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        n_places = it.scheduler.pool.max_requests
        await frontend.submit("a", max_new_tokens=2)
        assert (await frontend.read()).n_free == n_places - 1
        await it.engine.return_oldest(5)
        assert (await frontend.read()).n_free == n_places - 1
        await it.engine.return_oldest(5)
        assert (await frontend.read()).n_free == n_places


async def test_who_was_told_that_the_pool_is_full_is_told_when_it_is_not() -> None:
    async with (
        world() as it,
        Frontend(it.address) as busy,
        Frontend(it.address) as refused,
        Frontend(it.address) as idle,
    ):
        it.scheduler.pool.max_requests = 1
        await busy.accepted("a", max_new_tokens=2)
        await refused.rejection("b")
        await it.engine.return_oldest(5)
        await busy.cancel("a")
        await it.engine.return_oldest(5)
        message = await refused.read()
        assert message == scheduler_pb2.ConnectResponse(n_free=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(idle._stream.read(), 0.05)


async def test_a_request_ends_as_length_with_its_last_token() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", max_new_tokens=1)
        await it.engine.return_oldest(5)
        message = await frontend.read()
        assert [list(t.token_ids) for t in message.tokens] == [[5]]
        assert [c.reason for c in message.completed] == [scheduler_pb2.COMPLETION_REASON_LENGTH]


async def test_a_cancelled_request_frees_its_memory_with_the_iteration_it_is_in() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", max_new_tokens=20)
        await it.engine.next_batch()
        await frontend.cancel("a")
        [request] = it.scheduler.pool
        await until(lambda: request.is_cancelled)
        assert it.scheduler.kv_manager.n_reserved_slots > 0
        await it.engine.return_oldest()
        message = await frontend.read()
        assert [c.reason for c in message.completed] == [scheduler_pb2.COMPLETION_REASON_CANCELLED]
        assert it.scheduler.kv_manager.n_reserved_slots == 0


async def test_a_waiting_request_is_cancelled_at_once() -> None:
    async with world(n_blocks=2) as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", max_new_tokens=5)
        await it.engine.next_batch()
        await frontend.accepted("b", max_new_tokens=5)
        await frontend.cancel("b")
        assert [c.request_id for c in (await frontend.read()).completed] == ["b"]
        assert len(it.scheduler.pool) == 1


async def test_a_frontend_that_hangs_up_leaves_nothing_in_the_pool() -> None:
    async with world() as it, Frontend(it.address) as other:
        frontend = Frontend(it.address)
        await frontend.__aenter__()
        await frontend.accepted("a")
        await frontend.accepted("b")
        await other.accepted("c")
        await frontend.hang_up()
        await until(lambda: sum(request.is_cancelled for request in it.scheduler.pool) == 1)
        await it.engine.return_oldest()
        await it.engine.return_oldest()
        assert [request.request_id for request in it.scheduler.pool] == ["c"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": 0}, "prompt"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"prompt": 60, "max_new_tokens": 5}, "max_tokens"),
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"adapter": OTHER}, "model"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"temperature": 2.5}}, "temperature"),
        ({"sampling": {"min_p": 1.5}}, "min_p"),
        ({"sampling": {"presence_penalty": -3}}, "presence_penalty"),
        ({"sampling": {"frequency_penalty": float("nan")}}, "frequency_penalty"),
        ({"sampling": {"repetition_penalty": 1e-30}}, "repetition_penalty"),
        ({"sampling": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"sampling": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"sampling": {"stop_token_ids": [7] * 257}}, "stop_token_ids"),
        ({"sampling": {"min_tokens": 1, "stop_token_ids": range(200)}}, "stop_token_ids"),
        ({"sampling": {"logit_bias": {100: 1}}}, "logit_bias"),
        ({"sampling": {"logit_bias": {3: float("nan")}}}, "logit_bias.3"),
        ({"sampling": {"allowed_token_ids": [100]}}, "allowed_token_ids"),
        ({"sampling": {"allowed_token_ids": [3], "bad_token_ids": [3]}}, "allowed_token_ids"),
        ({"sampling": {"grammar": "start: /a/"}}, "grammar"),  # which this model cannot follow
        ({"sampling": {"grammar": "a" * (MAX_GRAMMAR_LENGTH + 1)}}, "grammar"),
    ],
    ids=[
        "no prompt",
        "nothing to generate",
        "too long",
        "salt",
        "adapter",
        "temperature",
        "temperature above 2",
        "min_p",
        "presence",
        "frequency",
        "repetition",
        "no repetition",
        "stop token below 0",
        "too many stop tokens",
        "no token left",
        "bias of no token",
        "bias that is no number",
        "no token allowed",
        "no token left of the allowed",
        "grammar for another model",
        "grammar that is too long",
    ],
)
async def test_a_submission_that_breaks_a_rule_is_rejected_by_name(
    options: dict[str, Any], field: str
) -> None:
    async with world() as it, Frontend(it.address) as frontend:
        rejection = await frontend.rejection("a", **options)
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_INVALID
        assert rejection.field == field
        assert rejection.message
        assert not rejection.message.startswith(field)
        assert len(it.scheduler.pool) == 0


async def test_the_models_own_stop_tokens_come_besides_as_many_as_a_client_may_have() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", sampling={"stop_token_ids": [STOP, *[7] * 256]})


async def test_ranks_read_the_options_and_one_seed_if_none_was_given() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", sampling={"temperature": 0.5})
        await frontend.accepted("b", sampling={"temperature": 0.5, "seed": None})
        params = {
            request.request_id: sampling_pb2.SamplingParams.FromString(request.sampling)
            for request in it.scheduler.pool
        }
        given, not_given = params[RequestId("a")], params[RequestId("b")]
        expected = SamplingParams(temperature=0.5, seed=3, stop_token_ids=(STOP,))
        assert from_proto(given) == expected
        assert not_given.HasField("seed")
        assert replace(from_proto(not_given), seed=3) == expected


async def test_a_frontend_of_another_version_is_told_to_try_again() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        submission = scheduler_pb2.Submission(
            request_id="a", prompt_token_ids=[1], max_new_tokens=1
        )
        await frontend.send(submission)
        [rejection] = (await frontend.read()).rejected
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_UNAVAILABLE
        assert len(it.scheduler.pool) == 0


async def test_a_request_id_in_use_is_rejected_and_the_first_one_lives() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a")
        rejection = await frontend.rejection("a")
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_INVALID
        await it.engine.return_oldest(STOP)
        assert len((await frontend.read()).completed) == 1


async def test_a_full_pool_rejects_with_a_retry_delay() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        it.scheduler.pool.max_requests = 1
        await frontend.accepted("a")
        rejection = await frontend.rejection("b")
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_POOL_FULL
        assert rejection.retry_after.ToNanoseconds() > 0


async def test_a_pool_full_of_tokens_rejects_with_a_retry_delay() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        it.scheduler.pool.max_tokens = 12
        await frontend.accepted("a", prompt=4, max_new_tokens=4)
        rejection = await frontend.rejection("b", prompt=1, max_new_tokens=4)
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_POOL_FULL
        assert rejection.retry_after.ToNanoseconds() > 0
        rejection = await frontend.rejection("c", prompt=9, max_new_tokens=4)
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_INVALID


RATE = scheduler_pb2.Account(name="alice", tokens_per_minute=6)


class Overloaded(AdmissionControl):
    """A control to which all but the second request would be too late."""

    def __init__(self) -> None:
        super().__init__(goal_s=1.0, is_fair=False)
        self.n_checked = 0

    def check(self, request: Request, now: float) -> float:
        self.n_checked += 1
        if self.n_checked != 2:
            raise TooLate("too late", retry_after_s=2.5, account_s=1.5)
        return 0.0


async def test_who_would_be_too_late_is_refused_with_when_to_try_again() -> None:
    registry = CollectorRegistry()
    observer = RequestObservers(RequestMetrics(registry))
    control = Overloaded()
    async with (
        world(control=control, observer=observer) as it,
        Frontend(it.address) as frontend,
    ):
        rejection = await frontend.rejection("a")
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_TOO_LATE
        assert rejection.retry_after.ToTimedelta() == timedelta(seconds=2.5)
        assert rejection.account_time.ToTimedelta() == timedelta(seconds=1.5)
        samples = Samples.of(registry)
        assert samples.sum("orcinus_requests_rejected_total", reason="too_late") == 1
        await frontend.accepted("b")
        await frontend.rejection("c")
        await frontend.accepted("d", is_resubmitted=True)  # a scheduler has promised it a place
        assert control.n_checked == 3


async def test_a_key_pays_for_prompts_and_outputs_at_all_frontends_together() -> None:
    now = 100.0
    async with (
        world(now=lambda: now) as it,
        Frontend(it.address) as one,
        Frontend(it.address) as other,
    ):
        await one.accepted("a", prompt=4, max_new_tokens=9, account=RATE)
        await other.accepted("b", prompt=1, max_new_tokens=1, account=RATE)
        for _ in range(3):
            await it.engine.return_oldest()
            await one.read()
        assert [len(message.completed) for message in [await other.read()]] == [1]
        # 5 tokens of prompts and 4 of outputs, where 6 are allowed: 30 s too early
        rejection = await other.rejection("c", account=RATE)
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_KEY_RATE
        assert rejection.retry_after.ToNanoseconds() == pytest.approx(30e9)
        await other.accepted("d", account=scheduler_pb2.Account(name="bob", tokens_per_minute=6))
        now += 30.1
        await other.accepted("e", account=RATE)


async def test_a_key_has_no_more_tokens_in_the_pool_than_it_may() -> None:
    account = scheduler_pb2.Account(name="alice", max_in_flight_tokens=10)
    async with world() as it, Frontend(it.address) as one, Frontend(it.address) as other:
        await one.accepted("a", prompt=3, max_new_tokens=4, account=account)
        rejection = await other.rejection("b", prompt=3, max_new_tokens=4, account=account)
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_KEY_IN_FLIGHT
        assert rejection.retry_after.ToNanoseconds() > 0
        rejection = await other.rejection("c", prompt=7, max_new_tokens=4, account=account)
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_INVALID
        await it.engine.return_oldest(STOP)
        assert len((await one.read()).completed) == 1
        await other.accepted("b", prompt=3, max_new_tokens=4, account=account)


async def test_a_request_that_was_taken_before_is_neither_held_up_nor_charged_again() -> None:
    async with world(now=lambda: 100.0) as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", prompt=5, account=RATE)
        await frontend.accepted("b", prompt=20, account=RATE, is_resubmitted=True)
        await frontend.accepted("c", prompt=2, account=RATE)
        rejection = await frontend.rejection("d", account=RATE)
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_KEY_RATE
        assert rejection.retry_after.ToNanoseconds() == pytest.approx(10e9)
        await frontend.accepted("e", prompt=20, account=RATE, is_resubmitted=True)


async def test_a_request_whose_time_is_up_while_it_waits_is_not_admitted() -> None:
    now = 100.0
    async with world(n_blocks=2, now=lambda: now) as it, Frontend(it.address) as frontend:
        await frontend.accepted("runs", max_new_tokens=5, time_left=timedelta(seconds=1))
        await frontend.accepted("waits", time_left=timedelta(seconds=2))
        await frontend.accepted("may wait", time_left=timedelta(seconds=3))
        await it.engine.next_batch()
        now += 2.0
        await it.engine.return_oldest()
        while not (completed := (await frontend.read()).completed):
            pass
        [ended] = completed
        assert ended.request_id == "waits"
        assert ended.reason == scheduler_pb2.COMPLETION_REASON_TIMED_OUT
        assert {request.request_id for request in it.scheduler.pool} == {"runs", "may wait"}


async def test_a_submission_says_whose_it_is_and_how_early_it_comes() -> None:
    order = Fair(ageing_s=30.0, now=time.monotonic)
    async with world(n_blocks=2, order=order) as it, Frontend(it.address) as frontend:
        await frontend.accepted("first", max_new_tokens=5)
        heavy = scheduler_pb2.Account(name="alice", weight=2.0)
        await frontend.accepted("late", priority=1, account=heavy)
        await frontend.accepted("early", priority=-1, account=heavy)
        await frontend.accepted("normal")
        names = [request.request_id for request in it.scheduler.pool.selectable()]
        assert names[-3:] == ["early", "normal", "late"]
        weights = {r.request_id: r.client.weight for r in it.scheduler.pool if r.client}
        assert weights == {"first": 1.0, "late": 2.0, "early": 2.0, "normal": 1.0}


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
async def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    async with world() as it, Frontend(it.address) as frontend:
        account = scheduler_pb2.Account(name="alice", weight=weight)
        rejection = await frontend.rejection("r", account=account)
        assert (rejection.field, len(it.scheduler.pool)) == ("account", 0)


@pytest.mark.parametrize("priority", [-11, 11])
async def test_a_priority_that_there_is_not_is_refused(priority: int) -> None:
    async with world() as it, Frontend(it.address) as frontend:
        rejection = await frontend.rejection("r", priority=priority)
        assert (rejection.field, len(it.scheduler.pool)) == ("priority", 0)


@pytest.mark.thorough
async def test_a_frontend_that_does_not_read_is_cut_off_and_can_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.service.SEND_LIMIT_S", 0.2)
    async with world() as it, Frontend(it.address) as honest:
        deaf = Frontend(it.address)
        await deaf.__aenter__()
        await deaf.accepted("a", max_new_tokens=9)
        await it.engine.next_batch()
        [connection] = [one for one in it.service._frontends if one.requests]
        async with asyncio.timeout(HANG_S):
            while connection in it.service._frontends:
                # More than gRPC takes for a stream that is not read.
                connection.reject("x" * 250, Unavailable("y" * 100_000))
                await asyncio.sleep(0.001)
        [request] = it.scheduler.pool
        assert request.is_cancelled
        await honest.accepted("b")
        with pytest.raises(grpc.aio.AioRpcError, match="does not read"):
            await deaf.read_on()
        await deaf.hang_up()
        async with Frontend(it.address) as again:
            await again.accepted("a")


async def test_a_frontend_for_which_too_much_waits_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.frontend_stream.FRONTEND_BYTES", 100 * UPDATE_BYTES)
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a")
        [connection] = it.service._frontends
        for number in range(101):
            connection.reject(str(number), Unavailable("no"))
        await until(lambda: not it.service._frontends)
        await until(lambda: all(request.is_cancelled for request in it.scheduler.pool))


async def test_a_request_whose_name_is_too_long_ends_its_stream() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.submit("x" * 257)
        with pytest.raises(grpc.aio.AioRpcError, match="request_id") as error:
            await frontend.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_there_are_only_so_many_frontends() -> None:
    async with world(max_frontends=2) as it, Frontend(it.address):
        async with Frontend(it.address):
            with pytest.raises(grpc.aio.AioRpcError, match="2 frontends") as error:
                await Frontend(it.address).read()
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: it.service._frontend_places.n_taken == 1)
        async with Frontend(it.address):
            pass


async def test_two_results_at_once_leave_two_batches_in_flight() -> None:
    async with world(pipeline_depth=2) as it, Frontend(it.address) as frontend:
        it.scheduler.policy.max_batch_size = 1
        await frontend.accepted("a", max_new_tokens=9)
        await frontend.accepted("b", max_new_tokens=9)
        await until(lambda: len(it.engine.batches) == 2)
        it.scheduler.policy.max_batch_size = 4
        await it.engine.return_oldest()
        await it.engine.return_oldest()  # before the loop has seen the first
        await until(lambda: len(it.engine.batches) == 2)
        assert [len(batch.spans) for batch in it.engine.batches] == [1, 1]


async def test_a_leader_that_resigns_ends_every_request_as_unavailable_and_then_the_stream() -> (
    None
):
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a")
        it.engine.fail(PipelineLost("stage 1 is gone"))
        with pytest.raises(PipelineLost):
            await it.serving
        it.service.resign("stage 1 is gone")
        [completion] = (await frontend.read()).completed
        assert completion.reason == scheduler_pb2.COMPLETION_REASON_UNAVAILABLE
        assert completion.message == "stage 1 is gone"
        assert await frontend.has_ended()
        async with rpc.connect(it.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="not the leader"):
                await scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect().read()


@pytest.mark.parametrize(
    ("change", "ended"),
    [
        ({}, []),
        ({"vocab_size": 50}, ["high token", "high stop", "high output"]),
        ({"max_model_len": 12}, ["long"]),  # whose prompt and output are 13
        ({"can_follow_grammars": False}, ["grammar"]),
        ({"eos_token_ids": [7]}, []),
    ],
    ids=str,
)
async def test_requests_that_another_checkpoint_cannot_take_end_when_it_serves(
    change: dict[str, Any], ended: list[str]
) -> None:
    before = scheduler_pb2.PipelineDescription(
        model="fake",
        vocab_size=100,
        max_model_len=64,
        eos_token_ids=[STOP],
        can_follow_grammars=True,
    )
    after = scheduler_pb2.PipelineDescription()
    after.CopyFrom(before)
    for name in change:
        after.ClearField(name)
    after.MergeFrom(scheduler_pb2.PipelineDescription(**change))
    async with world() as it, Frontend(it.address) as frontend:
        it.service.close()
        it.service.open(before, it.fleet)
        assert (await frontend.read()).pipeline == before
        await frontend.accepted("plain", sampling={"stop_token_ids": [STOP, 8]})
        await frontend.accepted("long", prompt=3, max_new_tokens=10)
        await frontend.accepted("grammar", sampling={"grammar": "start: /a/"})
        await frontend.accepted("high stop", sampling={"bad_token_ids": [99]})
        await frontend.send(submission_of("high token", prompt=[99]))
        await frontend.send(submission_of("high output", generated=[99]))
        await until(lambda: len(it.scheduler.pool) == 6)
        await it.engine.next_batch()
        it.engine.fail(PipelineLost("stage 0 is gone"))
        with pytest.raises(PipelineLost):
            await it.serving
        it.service.suspend(*it.scheduler.suspend())
        it.service.open(after, it.fleet)
        left = {str(request.request_id) for request in it.scheduler.pool}
        completed: dict[str, Any] = {}
        while len(completed) < len(ended):
            for end in (await frontend.read()).completed:
                completed[end.request_id] = end
        assert sorted(completed) == sorted(ended)
        assert not left.intersection(completed)
        assert len(left) + len(completed) == 6
        for end in completed.values():
            assert end.reason == scheduler_pb2.COMPLETION_REASON_FAILED
            assert "the pipeline that serves now cannot" in end.message


def submission_of(
    name: str, *, prompt: Sequence[int] = (1,), generated: Sequence[int] = ()
) -> scheduler_pb2.Submission:
    return scheduler_pb2.Submission(
        request_id=name,
        prompt_token_ids=prompt,
        max_new_tokens=4,
        generated_token_ids=generated,
        sampling=sampling_pb2.SamplingParams(seed=3),
    )


async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async with world() as it, Frontend(it.address) as frontend:
        await frontend.accepted("a", max_new_tokens=2)
        it.service.close()
        it.loop.drain()
        assert (await frontend.read()).is_closed
        rejection = await frontend.rejection("b")
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_UNAVAILABLE
        for _ in range(2):
            await it.engine.return_oldest()
        await asyncio.wait_for(it.serving, HANG_S)


async def test_a_message_that_cannot_be_parsed_is_the_frontends_mistake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as w, rpc.connect(w.address) as channel:
        connect: Any = channel.stream_stream(rpc.method_path(SERVICE, "Connect"))
        stream = connect(iter([b"\xff\xff"]), timeout=HANG_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ConnectRequest" in (caught.value.details() or "")
    # gRPC's poller says on asyncio's log that another loop of this process was quicker.
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if "PollerCompletionQueue" not in text]


async def test_frontends_are_told_why_there_is_no_pipeline_and_so_is_one_that_comes_later() -> None:
    async with world() as it, Frontend(it.address) as early:
        it.service.note_shortfall("a pipeline that serves lacks nothing")
        it.service.close()
        it.service.note_shortfall("a does not fit")
        told = await early.read()
        if not told.shortfall:  # the loss may leave as a message of its own
            assert told.is_closed
            told = await early.read()
        assert told.shortfall == it.service.shortfall == "a does not fit"
        late = Frontend(it.address)
        assert (await late.read()).shortfall == "a does not fit"
        await late.hang_up()
        it.service.open(scheduler_pb2.PipelineDescription(), it.fleet)
        assert (await early.read()).HasField("pipeline")
        assert it.service.shortfall == ""
