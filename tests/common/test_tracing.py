"""Traces as the environment wants them: there or not, and never in the way."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Link, NoOpTracer, Tracer, get_current_span

from services.common import tracing
from services.common.client_trace import ClientTrace
from tests.certificates import Authority, server_context
from tests.recorded_spans import PARENT_ID, TRACE_ID, TRACEPARENT, RecordedSpans
from tests.trace_receiver import TraceReceiver, http_trace_receiver, trace_receiver

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables of a process that nobody has told anything."""
    monkeypatch.setattr(tracing, "FLUSH_S", 1.0)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture(params=[pytest.param(trace_receiver, id="grpc")])
def receiver(
    request: pytest.FixtureRequest, environment: pytest.MonkeyPatch
) -> Iterator[TraceReceiver]:
    """A receiver that the variables name."""
    with request.param() as receiver:
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
    ],
    ids=["nothing", "empty", "disabled", "no exporter"],
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


@pytest.mark.parametrize(
    ("receiver", "compression"),
    [
        pytest.param(trace_receiver, "none", id="grpc"),
        pytest.param(trace_receiver, "deflate", id="grpc, compressed"),
        pytest.param(http_trace_receiver, "", id="http"),
        pytest.param(http_trace_receiver, "gzip", id="http, compressed"),
    ],
    indirect=["receiver"],
)
def test_spans_arrive_under_the_name_of_the_service(
    receiver: TraceReceiver, environment: pytest.MonkeyPatch, compression: str
) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    environment.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "")
    for name in ("http_proxy", "grpc_proxy", "all_proxy"):  # not for what is inside the system
        environment.setenv(name, "http://127.0.0.1:1")
    with tracing.started("orcinus-test") as traces:
        traces.tracer.start_span("x").end()
    [span] = receiver.wait_for(bool)
    assert (span.service, span.name) == ("orcinus-test", "x")
    assert span.resource["service.instance.id"]


def encrypted_receiver(kind: str, directory: Path) -> AbstractContextManager[TraceReceiver]:
    """A receiver for clients with a certificate of the same authority."""
    context = server_context(directory, Authority(), "localhost", "127.0.0.1")
    names = ("tls.key", "tls.crt", "ca.crt")
    key, certificate, ca = ((directory / name).read_bytes() for name in names)
    if kind == "grpc":
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, True)
        return trace_receiver(credentials=credentials)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca.decode())
    return http_trace_receiver(context)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_spans_are_encrypted_with_the_certificates_of_the_environment(
    environment: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    with encrypted_receiver(kind, tmp_path / "tls") as receiver:
        for name, value in receiver.environment.items():
            environment.setenv(name, value)
        for name, file in (
            ("CERTIFICATE", "ca.crt"),
            ("CLIENT_CERTIFICATE", "tls.crt"),
            ("CLIENT_KEY", "tls.key"),
        ):
            environment.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(tmp_path / "tls" / file))
        with tracing.started("test") as traces:
            traces.tracer.start_span("x").end()
        assert len(receiver.wait_for(bool)) == 1


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
        parent = traces.client_trace.parent_in([("traceparent", TRACEPARENT)])
        child = traces.tracer.start_span("child", parent)
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


@pytest.mark.usefixtures("black_hole")
def test_a_process_that_others_wait_for_gives_its_last_spans_less_time(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setattr(tracing, "FLUSH_S", 600.0)
    traces = tracing.start("test")
    make_spans(traces.tracer, 1)
    closing = threading.Thread(target=traces.close, args=(0.1,), daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


@pytest.mark.parametrize("limit_s", [None, 0.5], ids=["default", "given"])
def test_all_waits_of_the_end_are_within_its_timeout(
    environment: pytest.MonkeyPatch, limit_s: float | None
) -> None:
    """A request over HTTP goes on after its exporter was told to stop."""
    is_over = threading.Event()
    waited_s: list[float] = []

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert timeout is not None
            waited_s.append(timeout)

    environment.setattr(threading, "Thread", Thread)
    provider, exporter = Mock(TracerProvider), Mock(SpanExporter)
    provider.shutdown.side_effect = is_over.wait
    tracing.Tracing(provider, exporter).close(limit_s)
    is_over.set()
    exporter.shutdown.assert_called_once_with()
    assert sum(waited_s) == pytest.approx(tracing.FLUSH_S if limit_s is None else limit_s)


def test_malformed_headers_of_clients_write_no_lines(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv(ENDPOINT, "http://127.0.0.1:1")
    with tracing.started("test") as traces:
        for headers in (
            [("traceparent", TRACEPARENT), ("tracestate", "B A D")],
            [("traceparent", "0" * 600)],
            [("baggage", "x" * 9000)],
        ):
            traces.client_trace.parent_in(headers)
    assert not caplog.records


@pytest.mark.thorough
def test_nobody_waits_for_a_collector_that_is_gone(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(ENDPOINT, "http://127.0.0.1:1")
    traces = tracing.start("test")
    assert make_spans(traces.tracer, 20_000) < 10
    started = time.perf_counter()
    traces.close()
    assert time.perf_counter() - started < 8, "far less than an exporter takes"


def test_context_goes_into_a_message_and_comes_out_of_it() -> None:
    spans = RecordedSpans()
    parent = ClientTrace().parent_in([("traceparent", TRACEPARENT), ("tracestate", "a=b")])
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
