"""A real receiver of OTLP over gRPC or HTTP, which stores the spans that it receives."""

import gzip
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.fake_http import serving_http

ERROR = trace_pb2.Status.STATUS_CODE_ERROR


@dataclass(frozen=True)
class Link:
    """A link of a span to another one."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span that was received. Points in time are nanoseconds since 1970."""

    service: str
    resource: dict[str, Any]
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    links: list[Link]
    is_error: bool

    @property
    def seconds(self) -> float:
        """Duration of the span in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class TraceReceiver:
    """A receiver of spans, with all spans that any process has sent so far."""

    address: str = ""
    protocol: str = "grpc"
    scheme: str = "http"
    spans: list[ReceivedSpan] = field(default_factory=list)
    _has_more: threading.Condition = field(default_factory=threading.Condition)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make a process send its spans to this receiver, within about
        50 ms."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{self.scheme}://{self.address}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def wait_for(
        self, is_enough: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 30
    ) -> list[ReceivedSpan]:
        """Waits until `is_enough` returns True for the received spans, and returns all of them.
        Raises AssertionError after `timeout_s` seconds."""
        with self._has_more:
            assert self._has_more.wait_for(lambda: is_enough(self.spans), timeout_s), [
                (span.service, span.name) for span in self.spans
            ]
            return list(self.spans)

    def settle(self, quiet_s: float = 1.0) -> list[ReceivedSpan]:
        """Waits until no further spans arrive within `quiet_s` seconds, and returns all spans."""
        n_before = -1
        while n_before != len(self.spans):
            n_before = len(self.spans)
            time.sleep(quiet_s)
        return list(self.spans)

    def clear(self) -> None:
        """Forgets all received spans."""
        with self._has_more:
            self.spans.clear()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Handles OTLP's only method: stores the spans of a request."""
        with self._has_more:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                for scope in group.scope_spans:
                    self.spans.extend(_received(span, resource) for span in scope.spans)
            self._has_more.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def trace_receiver(
    receiver: TraceReceiver | None = None,
    *,
    address: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
) -> Iterator[TraceReceiver]:
    """Serves OTLP over gRPC at `address`, by default at a free port of loopback, and yields the
    receiver: `receiver` or, if that is None, a new one."""
    receiver = receiver or TraceReceiver(scheme="http" if credentials is None else "https")
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    receiver.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


class _Handler(BaseHTTPRequestHandler):
    receiver: TraceReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if encoding := self.headers["Content-Encoding"]:
            body = gzip.decompress(body) if encoding == "gzip" else zlib.decompress(body)
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        is_right = self.path == "/v1/traces"
        answer = self.receiver.Export(request, None).SerializeToString() if is_right else b""
        self.send_response(200 if is_right else 404)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@contextmanager
def http_trace_receiver(tls: ssl.SSLContext | None = None) -> Iterator[TraceReceiver]:
    """Serves OTLP over HTTP on a free port of loopback, and yields the receiver."""
    receiver = TraceReceiver(protocol="http/protobuf")
    with serving_http(_Handler, released=threading.Event(), tls=tls, receiver=receiver) as url:
        receiver.scheme, _, receiver.address = url.partition("://")
        yield receiver


def _received(span: trace_pb2.Span, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        service=resource["service.name"],
        resource=resource,
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[(event.name, event.time_unix_nano) for event in span.events],
        links=[
            Link(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes))
            for link in span.links
        ],
        is_error=span.status.code == ERROR,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
