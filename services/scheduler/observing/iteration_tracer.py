"""Traces of iterations: each recorded iteration is one span, in a trace of its own.

An iteration serves many requests, so the span of an iteration has no parent. The span has a link to
each recorded request of the batch, and the spans of these requests have links back.

An iteration is recorded in three cases: it has a recorded request, as often as a rate limit allows;
it was slow, as often as another limit allows; or the pipeline was lost while it was in flight. In
the first case the plan of the iteration carries the context of its span, and the stages' spans
become children of that span. In the second case the iteration is found to be slow only when it
returns: then its span has the times of the stages as attributes.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue
from orcinus.v1 import trace_pb2, worker_pb2

from services.common import semconv, tracing
from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.request_tracer import RequestTrace, RequestTracer
from services.scheduler.pipeline.membership import Pipeline

PIPELINE_LOST = "PipelineLost"

MAX_PENDING = 64
"""Largest number of slow iterations that wait for the stages' timings."""


class TraceBudget:
    """Limits the number of recorded events per second. After a pause, as many events as the limit
    allows in one second may be recorded at once."""

    def __init__(self, per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._capacity = max(1.0, per_s) if per_s > 0 else 0.0
        self._tokens = self._capacity
        self._filled_at = clock()

    def take(self) -> bool:
        """Returns whether an event may be recorded now. If so, counts the event."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class UsualDuration:
    """Learns the usual duration of iterations, for each magnitude of the number of tokens.

    The magnitude is the bit length of the number, so that a prefill is not compared with decodes.
    The usual duration is a running median: it goes up by a fiftieth with every longer iteration,
    and down with every shorter one.
    """

    SLOW = 4.0
    """An iteration is slow if it takes longer than this factor times the median."""
    WARM_UP = 32
    """Number of first iterations of each magnitude that never count as slow."""
    STEP = 1.02

    def __init__(self) -> None:
        self._medians: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def is_slow(self, n_tokens: int, duration_ns: int) -> bool:
        """Updates the median with an iteration, and returns whether the iteration was slow."""
        magnitude = n_tokens.bit_length()
        median = self._medians.get(magnitude, float(duration_ns))
        n_before = self._counts.get(magnitude, 0)
        step = self.STEP if duration_ns > median else 1 / self.STEP
        self._medians[magnitude] = median * step
        self._counts[magnitude] = n_before + 1
        return n_before >= self.WARM_UP and duration_ns > self.SLOW * median


class _Flight:
    """An iteration that was sent, with the state of the scheduler when it was sent."""

    def __init__(self, batch: Batch, scheduler: Scheduler, start_ns: int) -> None:
        self.batch = batch
        self.start_ns = start_ns
        self.end_ns = start_ns
        pool, memory = scheduler.pool, scheduler.kv_manager
        self.state = (
            scheduler.n_in_flight,
            pool.n_waiting,
            pool.n_running,
            memory.n_reserved_slots,
            memory.n_allocated_slots,
        )
        self.timings: dict[int, worker_pb2.IterationTiming] = {}
        self.span: otel.Span | None = None


class Traces:
    """Makes the tracers of requests and of iterations, with the limits that all epochs share."""

    def __init__(self, tracer: Tracer, *, policy: str, iterations_per_s: float) -> None:
        self.requests = RequestTracer(tracer)
        self._tracer = tracer
        self._policy = policy
        self._bucket = TraceBudget(iterations_per_s)
        self._slow_bucket = TraceBudget(iterations_per_s)

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "IterationTracer":
        """Returns the observer of an epoch that is about to form."""
        return IterationTracer(
            self._tracer,
            self.requests,
            pipeline,
            scheduler,
            policy=self._policy,
            bucket=self._bucket,
            slow_bucket=self._slow_bucket,
        )


_Rider = tuple[Span, RequestTrace]
"""The span of tokens that a recorded request has in a batch, and the trace of the request."""


class IterationTracer:
    """An iteration observer that records iterations of one epoch as spans of traces."""

    def __init__(
        self,
        tracer: Tracer,
        requests: RequestTracer,
        pipeline: Pipeline,
        scheduler: Scheduler,
        *,
        policy: str,
        bucket: TraceBudget,
        slow_bucket: TraceBudget,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tracer = tracer
        self._requests = requests
        self._place: dict[str, AttributeValue] = {
            semconv.EPOCH: pipeline.epoch,
            semconv.PIPELINE_NUMBER: pipeline.number,
        }
        self._n_stages = pipeline.n_stages
        self._bucket = bucket
        self._slow_bucket = slow_bucket
        self._clock_ns = clock_ns
        self._pace = UsualDuration()
        self._in_flight: dict[int, _Flight] = {}
        self._returned_ns = deque([0] * pipeline.n_stages, maxlen=pipeline.n_stages)
        self._slow: dict[int, _Flight] = {}
        self._common: dict[str, AttributeValue] = {
            **self._place,
            semconv.PIPELINE_ID: pipeline.pipeline_id,
            semconv.N_STAGES: pipeline.n_stages,
            semconv.MAX_IN_FLIGHT: scheduler.pipeline_depth,
            semconv.POLICY: policy,
            semconv.SLOTS: scheduler.kv_manager.n_slots,
        }

    def trace_of(self, iteration: int) -> trace_pb2.TraceContext | None:
        """Returns the trace context that the plan of an iteration carries. Returns None if the
        iteration is not recorded."""
        span = self._in_flight[iteration].span
        return None if span is None else tracing.to_message(span)

    def opened(self) -> None:
        """Does nothing: the trace of a request gets its epoch when the request is admitted."""

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        """Begins the span of the iteration, if the iteration is recorded. Notes the epoch and the
        pipeline of the requests that are admitted with this iteration."""
        flight = _Flight(batch, scheduler, self._clock_ns())
        self._in_flight[batch.iteration] = flight
        if self._requests.traces:
            riders = self._riders(batch)
            for span, trace in riders:
                if span.is_admission:
                    trace.run_in(self._place)
            if riders and self._bucket.take():
                flight.span = self._begin(flight, riders)

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        """Ends the span of the iteration. If the iteration was slow and has no span, makes one
        afterwards, as often as the limit allows."""
        flight = self._in_flight.pop(iteration)
        flight.end_ns = self._clock_ns()
        # The pipeline has room for one iteration in each stage; a further one waits for a return.
        had_room_ns = self._returned_ns[0]
        self._returned_ns.append(flight.end_ns)
        took_ns = flight.end_ns - max(flight.start_ns, had_room_ns)
        is_slow = self._pace.is_slow(flight.batch.n_tokens, took_ns)
        if flight.span is not None:
            if is_slow:
                flight.span.set_attribute(semconv.IS_SLOW, True)
            flight.span.end(flight.end_ns)
        elif is_slow and len(self._slow) < MAX_PENDING and self._slow_bucket.take():
            flight.span = self._begin(flight, self._riders(flight.batch))
            flight.span.set_attribute(semconv.IS_SLOW, True)
            self._slow[iteration] = flight
            self._end_if_complete(iteration, flight)

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        """Keeps the timing that a stage reports. The timing is needed only if the iteration turns
        out to be slow."""
        iteration = timing.iteration
        if iteration in self._in_flight:
            self._in_flight[iteration].timings[stage_index] = timing
        elif iteration in self._slow:
            flight = self._slow[iteration]
            flight.timings[stage_index] = timing
            self._end_if_complete(iteration, flight)

    def late(self, reason: str, moved: Sequence[Request]) -> None:
        """Does nothing: the iteration is recorded as slow when it returns."""

    def closed(self, loss: str | None) -> None:
        """Ends the spans that are left. If the pipeline was lost, `loss` is the reason, and each
        iteration that has not returned gets a span with this error."""
        for flight in self._slow.values():
            self._end_slow(flight)
        for flight in self._in_flight.values():
            span = flight.span
            if loss is not None:
                span = span or self._begin(flight, self._riders(flight.batch))
                span.set_attribute(semconv.ERROR_TYPE, PIPELINE_LOST)
                span.set_status(Status(StatusCode.ERROR, loss))
            if span is not None:
                span.add_event(semconv.ABANDONED)
                span.end(self._clock_ns())
        self._slow.clear()
        self._in_flight.clear()

    def _riders(self, batch: Batch) -> list[_Rider]:
        traces = self._requests.traces
        return [(span, traces[span.request]) for span in batch.spans if span.request in traces]

    def _begin(self, flight: _Flight, riders: Sequence[_Rider]) -> otel.Span:
        batch = flight.batch
        n_in_flight, n_waiting, n_running, n_reserved, n_allocated = flight.state
        span = self._tracer.start_span(
            semconv.ITERATION,
            Context(),  # a trace of its own
            attributes={
                **self._common,
                semconv.ITERATION_NUMBER: batch.iteration,
                semconv.N_REQUESTS: len(batch.spans),
                semconv.BATCH_N_TOKENS: flight.batch.n_tokens,
                semconv.N_PREFILLS: sum(map(_is_prefill, batch.spans)),
                semconv.IN_FLIGHT: n_in_flight,
                semconv.N_WAITING: n_waiting,
                semconv.N_RUNNING: n_running,
                semconv.RESERVED_SLOTS: n_reserved,
                semconv.ALLOCATED_SLOTS: n_allocated,
            },
            links=[_link_to(*rider) for rider in riders],
            start_time=flight.start_ns,
        )
        for part, trace in riders:
            trace.ride(span.get_span_context(), is_prefill=_is_prefill(part))
        return span

    def _end_if_complete(self, iteration: int, flight: _Flight) -> None:
        if len(flight.timings) == self._n_stages:
            del self._slow[iteration]
            self._end_slow(flight)

    def _end_slow(self, flight: _Flight) -> None:
        span, timings = flight.span, [flight.timings[index] for index in sorted(flight.timings)]
        if span is None:
            raise ValueError("an iteration that is not recorded")
        if len(timings) == self._n_stages:
            span.set_attribute(semconv.RECEIVE_WAIT, [t.receive_ns / 1e9 for t in timings])
            span.set_attribute(semconv.COMPUTE, [t.compute_ns / 1e9 for t in timings])
            span.set_attribute(semconv.SEND_WAIT, [t.send_ns / 1e9 for t in timings])
        span.end(flight.end_ns)


def _is_prefill(part: Span) -> bool:
    return part.start_position < part.request.n_prefill_tokens


def _link_to(part: Span, trace: RequestTrace) -> Link:
    attributes: dict[str, AttributeValue] = {
        semconv.REQUEST_ID: part.request.request_id,
        semconv.IS_PREFILL: _is_prefill(part),
        semconv.START_POSITION: part.start_position,
        semconv.N_TOKENS: part.n_tokens,
    }
    return Link(otel.get_current_span(trace.parent).get_span_context(), attributes)
