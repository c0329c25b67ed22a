"""Makes spans for the gRPC calls of a server, with the names and statuses of OpenTelemetry's RPC
conventions.

A caller's mistake, or a limit that a caller has reached, is not recorded as an error of the server.
A caller without permission cannot decide whether its call is recorded: its trace context is
ignored.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode

from services.common import rpc_handlers, semconv
from services.common.tracing import Tracing

SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


def server_spans(
    traces: Tracing, *, is_known: Callable[[str | None], bool]
) -> Callable[[str, Any], AbstractContextManager[None]]:
    """Returns an observer that records a span for each call. The span is the current span in the
    task of the call.

    `is_known` is called with the value of the metadata key `authorization`, and returns whether the
    caller has permission.
    """

    @contextmanager
    def around(method: str, context: Any) -> Iterator[None]:
        metadata = [(key, str(value)) for key, value in context.invocation_metadata() or ()]
        parent = Context()
        if is_known(dict(metadata).get("authorization")):
            parent = traces.client_trace.parent_in(metadata)
        span = traces.tracer.start_span(method, parent, kind=SpanKind.SERVER)
        # The context is never detached: the task belongs to this call, and a stream may be closed
        # in another task, which could not detach the context.
        otel_context.attach(trace.set_span_in_context(span))
        if not span.is_recording():
            yield
            return
        span.set_attributes({semconv.RPC_SYSTEM: "grpc", semconv.RPC_METHOD: method})
        code = grpc.StatusCode.OK
        try:
            yield
        except BaseException as error:
            code = rpc_handlers.status_of(error, context)
            raise
        finally:
            span.set_attribute(semconv.RPC_STATUS, code.name)
            if code in SERVER_ERRORS:
                span.set_attribute(semconv.ERROR_TYPE, code.name)
                span.set_status(Status(StatusCode.ERROR))
            span.end()

    return around
