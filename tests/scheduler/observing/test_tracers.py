"""Spans of requests and iterations, made from what the scheduler tells its observers."""

import dataclasses
import time
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from orcinus.v1 import scheduler_pb2, trace_pb2, worker_pb2

from services.common import semconv
from services.scheduler.core.batch import Batch
from services.scheduler.core.request import Request, RequestId
from services.scheduler.observing.iteration_tracer import (
    IterationTracer,
    TraceBudget,
    UsualDuration,
)
from services.scheduler.observing.request_tracer import RequestTracer
from services.scheduler.pipeline.membership import Member, Pipeline
from tests.recorded_spans import (
    PARENT_ID,
    TRACE_ID,
    TRACEPARENT,
    RecordedSpans,
    attributes,
    parent_id,
    span_id,
    trace_id,
)
from tests.scheduler.core.workload import build

MS = 1_000_000
N_STAGES = 2


def two_stages() -> Pipeline:
    member = Member("127.0.0.1:1", worker_pb2.DescribeResponse(n_kv_blocks=8))
    return Pipeline("test", 3, (member,) * N_STAGES)


def beside(world: "World") -> IterationTracer:
    """The tracer of a second pipeline's iterations."""
    return IterationTracer(
        world.spans.tracer,
        world.requests,
        dataclasses.replace(two_stages(), epoch=4, number=1),
        world.scheduler,
        policy="orca",
        bucket=TraceBudget(1000.0, clock=world.clock),
        slow_bucket=TraceBudget(1000.0, clock=world.clock),
        clock_ns=world.clock_ns,
    )


class World:
    """A scheduling core, its tracers, and a clock that moves when it is told."""

    def __init__(
        self, *, per_s: float = 1000.0, depth: int = 1, token_hand_off: bool = False
    ) -> None:
        self.now_ns = time.time_ns()
        self.spans = RecordedSpans()
        self.scheduler = build(
            max_batch_size=4,
            n_blocks=8,
            block_size=4,
            pipeline_depth=depth,
            token_hand_off=token_hand_off,
        )
        self.requests = RequestTracer(self.spans.tracer, clock_ns=self.clock_ns)
        self.iterations = IterationTracer(
            self.spans.tracer,
            self.requests,
            two_stages(),
            self.scheduler,
            policy="orca",
            bucket=TraceBudget(per_s, clock=self.clock),
            slow_bucket=TraceBudget(1000.0, clock=self.clock),
            clock_ns=self.clock_ns,
        )
        self.flights: list[Batch] = []

    def clock_ns(self) -> int:
        return self.now_ns

    def clock(self) -> float:
        return self.now_ns / 1e9

    def submit(
        self, name: str, *, n_prompt: int = 2, n_new: int = 3, recorded: bool = True
    ) -> Request:
        request = Request(RequestId(name), list(range(n_prompt)), n_new)
        self.scheduler.submit(request)
        trace = trace_pb2.TraceContext(traceparent=TRACEPARENT) if recorded else None
        self.requests.submitted(request, scheduler_pb2.Submission(request_id=name, trace=trace))
        return request

    def send(self) -> Batch:
        batch = self.scheduler.select()
        assert batch is not None
        for span in batch.spans:
            if span.is_admission:
                self.requests.admitted(span.request)
        self.iterations.sent(batch, self.scheduler)
        self.flights.append(batch)
        return batch

    def come_back(self, *, ms: float = 1.0) -> None:
        """The oldest iteration returns, so many milliseconds later."""
        self.now_ns += int(ms * MS)
        batch = self.flights.pop(0)
        tokens = [7] * sum(span.is_sampled for span in batch.spans)
        updates = self.scheduler.apply(batch.iteration, tokens)
        for update in updates:
            if update.token_id is not None and update.request.n_new_tokens == 1:
                self.requests.first_token(update.request)
            if update.finish_reason is not None:
                self.requests.ended(update.request, update.finish_reason)
        self.iterations.returned(batch.iteration, updates, self.scheduler)

    def run(self, n_iterations: int, *, ms: float = 1.0) -> None:
        for _ in range(n_iterations):
            self.send()
            self.come_back(ms=ms)

    def timed(self, iteration: int, *stages: int) -> None:
        for index in stages:
            self.iterations.timed(
                index, worker_pb2.IterationTiming(iteration=iteration, compute_ns=(index + 1) * MS)
            )

    def phases(self) -> dict[str, ReadableSpan]:
        names = (semconv.QUEUE, semconv.PREFILL, semconv.DECODE)
        return {span.name: span for span in self.spans.all() if span.name in names}

    def recorded_iterations(self) -> list[ReadableSpan]:
        return [span for span in self.spans.all() if span.name == semconv.ITERATION]


def test_phases_follow_each_other_and_belong_to_the_frontend_s_span() -> None:
    world = World()
    request = world.submit("a")
    world.now_ns += 5 * MS
    world.run(3, ms=2)
    queue, prefill, decode = (world.phases()[name] for name in ("queue", "prefill", "decode"))
    for span in (queue, prefill, decode):
        assert (trace_id(span), parent_id(span)) == (TRACE_ID, PARENT_ID)
        assert attributes(span)[semconv.REQUEST_ID] == request.request_id
        assert span.status.status_code is StatusCode.UNSET
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert attributes(queue)[semconv.TIME_IN_QUEUE] == 0.005
    assert attributes(prefill)[semconv.TIME_IN_PREFILL] == 0.002
    assert attributes(decode)[semconv.TIME_IN_DECODE] == 0.004
    assert (attributes(prefill)[semconv.N_TOKENS], attributes(decode)[semconv.N_TOKENS]) == (2, 2)
    [first_token] = prefill.events
    assert (first_token.name, first_token.timestamp) == (semconv.FIRST_TOKEN, prefill.end_time)
    assert attributes(decode)[semconv.REQUEST_END] == "length"
    assert not world.requests.traces


def test_links_lead_from_requests_to_iterations_and_back() -> None:
    world = World()
    world.submit("a")
    world.submit("silent", recorded=False)
    world.run(3)
    phases, iterations = world.phases(), world.recorded_iterations()
    assert [len(phases[name].links) for name in ("queue", "prefill", "decode")] == [0, 1, 2]
    linked = [link.context for name in ("prefill", "decode") for link in phases[name].links]
    assert linked == [span.get_span_context() for span in iterations]
    for span in iterations:
        [link] = span.links
        assert f"{link.context.trace_id:032x}" == TRACE_ID
        assert f"{link.context.span_id:016x}" == PARENT_ID
        assert (link.attributes or {})[semconv.REQUEST_ID] == "a"
        assert attributes(span)[semconv.N_REQUESTS] == 2, "others ride along, unnamed"
    assert len({trace_id(span) for span in iterations} | {TRACE_ID}) == 4, "each its own trace"


def test_a_decode_that_is_sent_before_the_first_token_is_back_is_linked_as_one() -> None:
    world = World(depth=2, token_hand_off=True)
    world.submit("a")
    world.send()
    for _ in range(2):
        world.send()
        world.come_back()
    world.come_back()
    phases, iterations = world.phases(), world.recorded_iterations()
    linked = [link.context for name in ("prefill", "decode") for link in phases[name].links]
    assert linked == [span.get_span_context() for span in iterations]
    assert [len(phases[name].links) for name in ("prefill", "decode")] == [1, 2]


def test_an_iteration_says_why_its_batch_looked_so() -> None:
    world = World()
    world.submit("a", n_prompt=8, n_new=8)
    world.submit("b", n_prompt=3, n_new=1)
    world.submit("too large for now", n_prompt=12, n_new=8)
    world.run(1, ms=4)
    [span] = world.recorded_iterations()
    assert attributes(span) == {
        semconv.PIPELINE_ID: "test",
        semconv.EPOCH: 3,
        semconv.PIPELINE_NUMBER: 0,
        semconv.N_STAGES: 2,
        semconv.MAX_IN_FLIGHT: 1,
        semconv.POLICY: "orca",
        semconv.SLOTS: 32,
        semconv.ITERATION_NUMBER: 1,
        semconv.N_REQUESTS: 2,
        semconv.BATCH_N_TOKENS: 11,
        semconv.N_PREFILLS: 2,
        semconv.IN_FLIGHT: 1,
        semconv.N_WAITING: 1,
        semconv.N_RUNNING: 2,
        semconv.RESERVED_SLOTS: 20,
        semconv.ALLOCATED_SLOTS: 12,
    }
    assert span.parent is None
    assert (span.end_time or 0) - (span.start_time or 0) == 4 * MS


def test_a_trace_shows_each_pipeline_that_has_run_the_request() -> None:
    world = World()
    request = world.submit("a", n_new=4)
    other = beside(world)
    other.opened()
    world.iterations.opened()
    world.run(2)
    world.send()
    world.flights.clear()
    world.iterations.closed("the pipeline was lost")
    world.scheduler.suspend()
    world.requests.suspended(request)
    world.iterations = other
    world.run(2)
    places = [
        (span.name, attributes(span)[semconv.PIPELINE_NUMBER], attributes(span)[semconv.EPOCH])
        for span in world.spans.all()
        if span.name in (semconv.PREFILL, semconv.DECODE)
    ]
    assert places == [("prefill", 0, 3), ("decode", 0, 3), ("prefill", 1, 4), ("decode", 1, 4)]
    numbers = [attributes(span)[semconv.PIPELINE_NUMBER] for span in world.recorded_iterations()]
    assert numbers == [0, 0, 0, 1, 1]


def test_a_trace_says_where_another_build_continues_the_request() -> None:
    world = World()
    world.scheduler.pool.build = "new"
    request = world.submit("a", n_new=3)
    request.generated_token_ids.append(7)
    request.n_tokens += 1
    request.build = "old"
    world.run(2)
    [event] = [
        event
        for span in world.spans.all()
        for event in span.events
        if event.name == semconv.BUILD_CHANGED
    ]
    assert dict(event.attributes or {}) == {semconv.BUILD: "new", semconv.LEFT_BUILD: "old"}


def test_only_the_plan_of_a_recorded_iteration_takes_its_span_along() -> None:
    world = World()
    world.submit("a", n_new=1)
    batch = world.send()
    message = world.iterations.trace_of(batch.iteration)
    world.come_back()
    [span] = world.recorded_iterations()
    assert message is not None
    assert trace_id(span) in message.traceparent
    assert span_id(span) in message.traceparent
    world.submit("silent", recorded=False)
    assert world.iterations.trace_of(world.send().iteration) is None


def test_a_request_of_one_token_has_no_decode() -> None:
    world = World()
    world.submit("a", n_new=1)
    world.run(1)
    assert list(world.phases()) == ["queue", "prefill"]
    assert attributes(world.phases()["prefill"])[semconv.REQUEST_END] == "length"


def test_a_cancelled_request_ends_where_it_is() -> None:
    world = World()
    waiting, running = world.submit("waits"), world.submit("runs")
    for request in (waiting, running):
        if request is running:
            world.run(2)
        [update] = world.scheduler.cancel(request)
        assert update.finish_reason is not None
        world.requests.ended(request, update.finish_reason)
    ends = [(s.name, attributes(s).get(semconv.REQUEST_END)) for s in world.spans.all()]
    assert ("queue", "cancelled") in ends
    assert ("decode", "cancelled") in ends
    assert all(s.status.status_code is StatusCode.UNSET for s in world.spans.all())


def test_a_request_that_loses_its_pipeline_fails_in_its_last_phase() -> None:
    world = World()
    request = world.submit("a")
    world.run(1)
    world.requests.failed(request)
    phases = world.phases()
    assert phases["decode"].status.status_code is StatusCode.ERROR
    assert attributes(phases["decode"])[semconv.ERROR_TYPE] == "UNAVAILABLE"
    assert phases["prefill"].status.status_code is StatusCode.UNSET


def test_iterations_are_recorded_no_more_often_than_allowed() -> None:
    world = World(per_s=2)
    world.submit("a", n_new=20)
    world.run(5, ms=1)
    assert len(world.recorded_iterations()) == 2, "as many at once as in a second"
    world.run(5, ms=200)
    assert len(world.recorded_iterations()) == 3, "two a second, counted when they are sent"
    world.run(10, ms=0.1)
    numbers = [attributes(span)[semconv.ITERATION_NUMBER] for span in world.recorded_iterations()]
    assert len(world.phases()["decode"].links) == len(numbers) - 1


def test_a_slow_iteration_is_recorded_whoever_rides_it() -> None:
    world = World()
    for index in range(4):
        world.submit(str(index), n_prompt=1, n_new=15, recorded=False)
        world.run(15)
    assert not world.spans.all()
    world.submit("x", n_prompt=1, n_new=1, recorded=False)
    iteration = world.send().iteration
    world.timed(iteration, 1)
    world.come_back(ms=50)
    assert not world.spans.all(), "it waits for what the stages have to say"
    world.timed(iteration, 0)
    [span] = world.recorded_iterations()
    assert attributes(span)[semconv.IS_SLOW] is True
    assert attributes(span)[semconv.COMPUTE] == (0.001, 0.002)
    assert (span.end_time or 0) - (span.start_time or 0) == 50 * MS


def test_an_iteration_that_waited_behind_others_is_not_slow() -> None:
    world = World(depth=3)
    for index in range(4):
        world.submit(str(index), n_prompt=1, n_new=15, recorded=False)
        world.run(15)
    for index in range(N_STAGES + 1):
        world.submit(f"x{index}", n_prompt=1, n_new=1, recorded=False)
        world.send()
    world.come_back(ms=3)
    world.come_back(ms=0)
    world.come_back(ms=2)
    assert not world.recorded_iterations()


def test_an_iteration_under_which_the_pipeline_is_lost_is_recorded() -> None:
    world = World(per_s=0, depth=2)
    world.submit("a")
    world.send()
    world.iterations.closed("stage 1 is gone")
    [span] = world.recorded_iterations()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "stage 1 is gone"
    assert attributes(span)[semconv.ERROR_TYPE] == "PipelineLost"
    assert len(span.links) == 1


def test_an_epoch_that_is_drained_loses_nothing() -> None:
    world = World()
    world.submit("a")
    world.send()
    world.iterations.closed(None)
    [span] = world.recorded_iterations()
    assert span.status.status_code is StatusCode.UNSET
    assert [event.name for event in span.events] == [semconv.ABANDONED]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("per_s", "at", "passed"),
    [(2, 0.0, 2), (2, 0.5, 3), (2, 10.0, 4), (0.5, 0.0, 1), (0.5, 2.0, 2), (0, 100.0, 0)],
)
def test_a_bucket_holds_one_second_s_worth(per_s: float, at: float, passed: int) -> None:
    clock = Clock()
    bucket = TraceBudget(per_s, clock=clock)
    n_passed = sum(bucket.take() for _ in range(100))
    clock.now = at
    assert n_passed + sum(bucket.take() for _ in range(100)) == (passed if at else n_passed)


def test_pace_knows_prefills_from_decodes_and_follows_the_times() -> None:
    pace = UsualDuration()
    for _ in range(100):
        assert not pace.is_slow(4, 1 * MS)
        assert not pace.is_slow(1000, 80 * MS)
    assert pace.is_slow(4, 5 * MS)
    assert not pace.is_slow(4, 3 * MS)
    assert not pace.is_slow(1000, 100 * MS)
    slow = [pace.is_slow(4, 10 * MS) for _ in range(100)]
    assert slow[0]
    assert not slow[-1], "what takes long every time is not slow"
