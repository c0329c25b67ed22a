"""Sends spans from this process to a collector, which may be unreachable: in batches, from a
bounded queue.

When the collector is slow or unreachable, spans are dropped, and no caller waits. An `OutageLog`
reports such an outage. The several lines that OpenTelemetry's exporters would log for each batch
are suppressed.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from services.common.otel_variables import QUEUE
from services.common.outage_log import OutageLog
from services.common.url_credentials import credentials_in, without

log = logging.getLogger(__name__)

_EXPORTERS = logging.getLogger("opentelemetry.exporter")
_GRPC_EXPORTER = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
_RETRYING = re.compile(r",? retrying in [0-9.]+s\.?")


class BoundedSpanProcessor(BatchSpanProcessor):
    """Queues spans, and sends them in batches in a thread of its own. The queue is bounded.

    A span is dropped if the queue is full.
    """

    def __init__(self, exporter: SpanExporter, *, endpoint: str, max_queue_size: int) -> None:
        """`endpoint` is the URL of the collector, for log lines. The URL is logged without its
        credentials. `max_queue_size` is the largest number of spans in the queue."""
        self._losses = OutageLog(
            log,
            failing="spans are dropped",
            works="spans are sent again",
            counted="were dropped",
        )
        self._max_waiting = max_queue_size
        self._n_waiting = 0
        self._lock = threading.Lock()
        super().__init__(
            _ReportingExporter(exporter, endpoint, self._losses, on_taken=self._taken),
            max_queue_size=max_queue_size,
            meter_provider=NoOpMeterProvider(),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span that has ended. Drops the span if the queue is full."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            has_room = self._n_waiting < self._max_waiting
            self._n_waiting += has_room
        if has_room:
            super().on_end(span)
        else:
            self._losses.failed(f"the queue is full ({QUEUE} is {self._max_waiting})")

    def _taken(self, n_spans: int) -> None:
        with self._lock:
            self._n_waiting -= n_spans


class _ReportingExporter(SpanExporter):
    """An exporter that reports which batches were sent and which were lost."""

    def __init__(
        self,
        exporter: SpanExporter,
        endpoint: str,
        losses: OutageLog,
        *,
        on_taken: Callable[[int], None],
    ) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._credentials = credentials_in(endpoint)
        self._losses = losses
        self._on_taken = on_taken
        self._complaint = _Complaint()
        _EXPORTERS.addHandler(self._complaint)
        _EXPORTERS.setLevel(logging.WARNING)
        _EXPORTERS.propagate = False
        _GRPC_EXPORTER.filters.clear()  # they would drop a message that is like the last one

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch of spans. Returns when the collector has accepted the batch, or when the
        batch is lost."""
        self._on_taken(len(spans))
        self._complaint.is_wanted = True
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._losses.worked()
        else:
            reason = f"{self._endpoint}: {self._complaint.message}"
            self._losses.failed(without(self._credentials, reason), len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        _EXPORTERS.removeHandler(self._complaint)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Complaint(logging.Handler):
    """Keeps the first log message of an exporter about a batch. This message contains the reason
    why the batch could not be sent."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.message = "the exporter gives no reason"
        self.is_wanted = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.is_wanted:
            self.message = _RETRYING.sub("", record.getMessage())
            self.is_wanted = False
