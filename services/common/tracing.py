"""Traces, set up from OpenTelemetry's own environment variables, or switched off.

Without an endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`, or `…_TRACES_ENDPOINT`) there is no exporter, no
thread and no error, and all tracers do nothing. With an endpoint, a thread sends spans in batches
from a bounded queue. When the collector is slow or gone, spans are dropped, and no caller waits. At
the end of the process, sending the last spans is given up after `FLUSH_S`.

The trace context of a client is read in the formats that `OTEL_PROPAGATORS` names. Between
processes of this project, the context is sent as a field of messages, as W3C Trace Context, and
only for recorded spans.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from orcinus.v1 import trace_pb2

from services.common import otel_variables, semconv
from services.common.client_trace import DEFAULT, ClientTrace

if TYPE_CHECKING:  # the import of the SDK reads variables, and fails if one is wrong
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

FLUSH_S = 3.0
"""Timeout in seconds for sending the last spans of a process, unless the process has less time."""

STOP_SHARE = 0.1
"""Fraction of the timeout for sending the last spans that is kept for stopping the exporter, after
sending has been given up. A request over HTTP does not stop; it ends with the process."""

MAX_LINKS = 1024
"""Largest number of links of a span, unless `OTEL_SPAN_LINK_COUNT_LIMIT` sets another number. It
suffices for a batch, or for the recorded iterations of a long answer."""

_W3C = TraceContextTextMapPropagator()


class Tracing:
    """The tracing of one process: the tracer that makes its spans, and the exporter that sends
    them."""

    def __init__(
        self,
        provider: "TracerProvider | None",
        exporter: "SpanExporter | None",
        client_trace: ClientTrace | None = None,
    ) -> None:
        self._provider = provider
        self._exporter = exporter
        self.tracer: trace.Tracer = (
            trace.NoOpTracer() if provider is None else provider.get_tracer(semconv.SCOPE)
        )
        self.client_trace = client_trace or ClientTrace()
        """The reader of clients' trace contexts."""

    @property
    def is_on(self) -> bool:
        """Whether any span can be recorded."""
        return self._provider is not None

    def close(self, limit_s: float | None = None) -> None:
        """Sends the remaining spans, and returns within `limit_s` seconds, by default `FLUSH_S`.
        Shortly before this time is over, drops the spans that have not been sent. Must not be
        called on the event loop."""
        limit_s = FLUSH_S if limit_s is None else limit_s
        if self._provider is None or self._exporter is None:
            return
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join((1 - STOP_SHARE) * limit_s)
        if ending.is_alive():
            log.warning("the collector does not take the last spans; they are lost")
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
            self._exporter.shutdown()
            ending.join(STOP_SHARE * limit_s)


OFF = Tracing(None, None)
"""The tracing of a process whose traces are off. Its spans are not recorded."""


def start(service_name: str, *, decides: bool = False, max_links: int = 0) -> Tracing:
    """Starts the tracing of this process, if its environment variables switch it on.

    `service_name` is used unless the environment variables set a name. If `decides` is true, the
    process begins only traces that it has chosen, and records all of them. If not, the sampler of
    `OTEL_TRACES_SAMPLER` decides. A trace that began in another process is recorded if that process
    records it.
    """
    if not otel_variables.are_traces_wanted(os.environ):
        return OFF
    for name in [name for name, value in os.environ.items() if not value]:
        if name.startswith("OTEL_"):
            del os.environ[name]  # the SDK would not read an empty variable as unset
    # Imported here because the import reads the variables, and takes 0.1 s.
    from services.common.trace_provider import new_provider

    provider, exporter = new_provider(
        service_name, decides=decides, max_links=max(MAX_LINKS, max_links)
    )
    return Tracing(provider, exporter, ClientTrace(os.environ.get("OTEL_PROPAGATORS", DEFAULT)))


@contextlib.contextmanager
def started(service_name: str, *, decides: bool = False, max_links: int = 0) -> Iterator[Tracing]:
    """Starts traces for a `with` block and sends the last spans at its end. `start` describes the
    arguments."""
    tracing = start(service_name, decides=decides, max_links=max_links)
    try:
        yield tracing
    finally:
        tracing.close()


def to_message(span: trace.Span) -> trace_pb2.TraceContext:
    """Returns the context of a span as a protobuf message. The message is empty if the span is not
    recorded."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    return trace_pb2.TraceContext(**carrier)


def from_message(message: trace_pb2.TraceContext) -> Context:
    """Returns the parent context in a protobuf message, for spans of this process."""
    carrier = {"traceparent": message.traceparent, "tracestate": message.tracestate}
    return _W3C.extract(carrier, Context())


def current_ids() -> tuple[str, str] | None:
    """Returns the ids of the current trace and span in hexadecimal, for logs. Returns None if there
    is no current span."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
