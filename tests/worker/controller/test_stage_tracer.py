"""Spans of stages, made from what their ranks report."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from orcinus.v1 import trace_pb2, worker_pb2

from services.common import semconv
from services.worker.controller.stage_tracer import MAX_UNDER_WAY, StageTracer
from tests.recorded_spans import (
    PARENT_ID,
    TRACE_ID,
    TRACEPARENT,
    RecordedSpans,
    attributes,
    parent_id,
    trace_id,
)

MS = 1_000_000
T0 = 1_700_000_000_000_000_000


def traced(
    iteration: int, *, epoch: int = 1, start_ns: int = T0, message: int | None = None
) -> bytes:
    """A rank's trace of an iteration of 1 + 2 + 3 milliseconds. Its plan is the message with the
    iteration's number, unless another number is given."""
    return worker_pb2.IterationTrace(
        parent=trace_pb2.TraceContext(traceparent=TRACEPARENT),
        epoch=epoch,
        start_unix_ns=start_ns,
        timing=worker_pb2.IterationTiming(
            iteration=iteration, receive_ns=1 * MS, compute_ns=2 * MS, send_ns=3 * MS
        ),
        n_requests=5,
        n_tokens=6,
        message_number=message or iteration,
    ).SerializeToString()


def bounds(span: ReadableSpan) -> tuple[float, float]:
    """Its start and end in milliseconds after T0."""
    return ((span.start_time or 0) - T0) / MS, ((span.end_time or 0) - T0) / MS


def test_a_span_is_the_iteration_s_child_and_lasts_from_the_plan_to_the_end() -> None:
    spans = RecordedSpans()
    tracer = StageTracer(spans.tracer, 3)
    tracer.joined(1)
    tracer.forwarded(T0 - 4 * MS)
    tracer.record(traced(1))
    [span] = spans.all()
    assert (trace_id(span), parent_id(span)) == (TRACE_ID, PARENT_ID)
    assert bounds(span) == (-4, 6)
    assert attributes(span) == {
        semconv.STAGE_INDEX: 3,
        semconv.EPOCH: 1,
        semconv.ITERATION_NUMBER: 1,
        semconv.N_REQUESTS: 5,
        semconv.BATCH_N_TOKENS: 6,
        semconv.QUEUE_WAIT: 0.004,
        semconv.RECEIVE_WAIT: 0.001,
        semconv.COMPUTE: 0.002,
        semconv.SEND_WAIT: 0.003,
    }


def test_each_iteration_has_the_time_of_its_own_plan() -> None:
    spans = RecordedSpans()
    tracer = StageTracer(spans.tracer, 0)
    for epoch in (1, 2):
        tracer.joined(epoch)
        for n_plans in range(1, 4):
            tracer.forwarded(T0 - n_plans * MS)
    tracer.record(traced(1, epoch=2))
    tracer.record(traced(3, epoch=2))
    assert [bounds(span)[0] for span in spans.all()] == [-1, -3]


def test_messages_without_an_iteration_count_as_well() -> None:
    spans = RecordedSpans()
    tracer = StageTracer(spans.tracer, 0)
    tracer.joined(1)
    for n_messages in range(1, 4):
        tracer.forwarded(T0 - n_messages * MS)
    tracer.record(traced(2, message=3))  # an order about adapters came between the plans
    assert [bounds(span)[0] for span in spans.all()] == [-3]


@pytest.mark.parametrize(
    ("iteration", "epoch"), [(1, 1), (MAX_UNDER_WAY + 2, 1), (5, 7)], ids=["old", "future", "epoch"]
)
def test_a_plan_that_nobody_remembers_begins_with_the_rank(iteration: int, epoch: int) -> None:
    spans = RecordedSpans()
    tracer = StageTracer(spans.tracer, 0)
    tracer.joined(1)
    for _ in range(MAX_UNDER_WAY + 1):
        tracer.forwarded(T0 - MS)
    tracer.record(traced(iteration, epoch=epoch))
    [span] = spans.all()
    assert bounds(span) == (0, 6)
    assert attributes(span)[semconv.QUEUE_WAIT] == 0
