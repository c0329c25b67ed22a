"""A collector that is away or slow costs spans, and few lines."""

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.common import tracing
from services.common.span_export import BoundedSpanProcessor
from tests.addresses import free_address
from tests.trace_receiver import trace_receiver


class Reported:
    """The lines that are shown."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog

    def lines(self) -> list[str]:
        """Returns the lines since the last call, without those of loggers that show nothing, to
        which pytest listens, too."""
        shown = [it for it in self._caplog.records if it.name.startswith("services.")]
        lines = [record.getMessage() for record in shown]
        self._caplog.clear()
        return lines


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Reported:
    return Reported(caplog)


class Held(SpanExporter):
    """An exporter whose collector takes nothing until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.n_sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.released.wait(60)
        self.n_sent += len(spans)
        return SpanExportResult.SUCCESS


def test_a_full_queue_drops_spans_and_counts_them(reported: Reported) -> None:
    exporter = Held()
    provider = TracerProvider(shutdown_on_exit=False)
    processor = BoundedSpanProcessor(exporter, endpoint="", max_queue_size=1000)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    for _ in range(5000):
        tracer.start_span("x").end()
    [line] = reported.lines()
    assert line == "spans are dropped: the queue is full (OTEL_BSP_MAX_QUEUE_SIZE is 1000)"
    exporter.released.set()
    provider.shutdown()
    [line] = reported.lines()
    assert line.startswith(f"spans are sent again; {5000 - exporter.n_sent} were dropped in ")
    assert 1000 <= exporter.n_sent < 2000


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_away_is_told_in_one_line(
    reported: Reported, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    address = free_address()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://user:hidden@{address}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # for one attempt
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with tracing.started("test") as traces:
        for _ in range(20):
            traces.tracer.start_span("x").end()
    [line] = reported.lines()
    assert line.startswith(f"spans are dropped: http://{address}: Failed to export")
    assert "hidden" not in line


def test_a_collector_that_comes_back_gets_spans_again(
    reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with tracing.started("test") as traces:
        traces.tracer.start_span("x").end()
        seen = threading.Event()
        while not reported.lines():
            seen.wait(0.01)
        with trace_receiver(address=address) as receiver:
            while not receiver.spans:
                traces.tracer.start_span("x").end()
                seen.wait(0.05)
            while not (lines := reported.lines()):
                seen.wait(0.01)
    assert lines[0].startswith("spans are sent again; ")
