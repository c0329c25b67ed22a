"""Traces as the environment wants them: there or not, and never in the way."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.trace import Link, NoOpTracer, Tracer, get_current_span

from services.common import tracing
from tests.recorded_spans import PARENT_ID, TRACE_ID, TRACEPARENT, RecordedSpans
from tests.trace_receiver import TraceReceiver, trace_receiver

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables of a process that nobody has told anything."""
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setattr(tracing, "FLUSH_S", 1.0)
    for name in ("TRACES_SAMPLER", "TRACES_EXPORTER", "SERVICE_NAME", "RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    return monkeypatch


@pytest.fixture
def receiver(environment: pytest.MonkeyPatch) -> Iterator[TraceReceiver]:
    """A receiver that the variables name."""
    with trace_receiver() as receiver:
        for name, value in receiver.environment.items():
            environment.setenv(name, value)
        yield receiver


@pytest.fixture
def black_hole(environment: pytest.MonkeyPatch) -> Iterator[None]:
    """An endpoint that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment.setenv(ENDPOINT, f"http://127.0.0.1:{listener.getsockname()[1]}")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield


def make_spans(tracer: Tracer, n_spans: int) -> float:
    """Makes spans and says how many seconds that took."""
    started = time.perf_counter()
    for _ in range(n_spans):
        tracer.start_span("x").end()
    return time.perf_counter() - started


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {ENDPOINT: ""},
        {ENDPOINT: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {ENDPOINT: "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {ENDPOINT: "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
    ids=["nothing", "empty", "disabled", "no exporter", "a protocol that is not spoken"],
)
def test_what_nobody_wants_is_not_there(
    environment: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    threads = set(threading.enumerate())
    traces = tracing.start("test")
    assert not traces.is_on
    assert isinstance(traces.tracer, NoOpTracer)
    make_spans(traces.tracer, 10)
    traces.close()
    assert set(threading.enumerate()) == threads


def test_spans_arrive_under_the_name_of_the_service(receiver: TraceReceiver) -> None:
    with tracing.started("orcinus-test") as traces:
        traces.tracer.start_span("x").end()
    [span] = receiver.wait_for(bool)
    assert (span.service, span.name) == ("orcinus-test", "x")
    assert span.resource["service.instance.id"]


def test_the_environment_names_the_service(
    receiver: TraceReceiver, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("OTEL_SERVICE_NAME", "mine")
    environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-0,service.instance.id=uid")
    with tracing.started("orcinus-test") as traces:
        traces.tracer.start_span("x").end()
    [span] = receiver.wait_for(bool)
    expected = {"service.name": "mine", "k8s.pod.name": "pod-0", "service.instance.id": "uid"}
    assert expected.items() <= span.resource.items()


@pytest.mark.parametrize("decides", [False, True], ids=["asks the sampler", "decides"])
@pytest.mark.parametrize(
    ("sampler", "ratio"),
    [("parentbased_traceidratio", "0"), ("parentbased_always_off", ""), ("always_on", "")],
)
def test_who_decides_what_is_recorded(
    receiver: TraceReceiver,
    environment: pytest.MonkeyPatch,
    sampler: str,
    ratio: str,
    decides: bool,
) -> None:
    environment.setenv("OTEL_TRACES_SAMPLER", sampler)
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    with tracing.started("test", decides=decides) as traces:
        root = traces.tracer.start_span("root")
        child = traces.tracer.start_span("child", tracing.parent_in({"traceparent": TRACEPARENT}))
    assert root.is_recording() is (sampler == "always_on" or (decides and ratio == "0"))
    assert child.is_recording(), "its origin has decided"


def test_a_batch_of_links_fits(receiver: TraceReceiver) -> None:
    with tracing.started("test", max_links=2000) as traces:
        links = [Link(traces.tracer.start_span("x").get_span_context()) for _ in range(2000)]
        traces.tracer.start_span("iteration", links=links).end()
    [span] = receiver.wait_for(bool)
    assert len(span.links) == 2000


@pytest.mark.usefixtures("black_hole")
def test_nobody_waits_for_a_collector_that_says_nothing() -> None:
    traces = tracing.start("test")
    spans_s = make_spans(traces.tracer, 20_000)  # ten times what the queue holds
    assert spans_s < 10, "they are dropped"
    started = time.perf_counter()
    traces.close()
    assert time.perf_counter() - started < 8, "far less than an exporter takes"


def test_nobody_waits_for_a_collector_that_is_gone(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(ENDPOINT, "http://127.0.0.1:1")
    traces = tracing.start("test")
    assert make_spans(traces.tracer, 20_000) < 10
    started = time.perf_counter()
    traces.close()
    assert time.perf_counter() - started < 8, "far less than an exporter takes"


def test_context_goes_into_a_message_and_comes_out_of_it() -> None:
    spans = RecordedSpans()
    parent = tracing.parent_in({"traceparent": TRACEPARENT, "tracestate": "a=b"})
    message = tracing.to_message(spans.tracer.start_span("x", parent))
    assert TRACE_ID in message.traceparent
    assert message.tracestate == "a=b"
    context = get_current_span(tracing.from_message(message)).get_span_context()
    assert context.is_remote
    assert f"{context.trace_id:032x}" == TRACE_ID
    assert f"{context.span_id:016x}" != PARENT_ID


def test_there_are_no_ids_where_there_is_no_span() -> None:
    assert tracing.current_ids() is None
    spans = RecordedSpans()
    with spans.tracer.start_as_current_span("x") as span:
        ids = tracing.current_ids()
    context = span.get_span_context()
    assert ids == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
