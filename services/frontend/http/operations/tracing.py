"""Makes a span for each HTTP request. Names, attributes and statuses follow OpenTelemetry's
conventions for HTTP. Probes have no spans.

Only a caller with a known API key can choose whether a request is recorded, with the header
`traceparent`. The header of other callers is ignored, and the sampler decides.
"""

from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import semconv
from services.common.tracing import Tracing
from services.frontend.http.protocol import credentials
from services.frontend.request.client_call import current_call

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
"""Methods that may be the name of a span. Other methods are not used as names, because clients
could invent any number of methods."""

PROBES = frozenset({"/health", "/ready", "/serving"})


class TracedApp:
    """An ASGI app that starts a span for each request. The span is the current span in the task of
    the request."""

    def __init__(
        self, app: ASGIApp, traces: Tracing, *, is_known: Callable[[str | None], bool]
    ) -> None:
        """Wraps an app. `is_known` says whether credentials belong to a known caller."""
        self._app = app
        self._tracer = traces.tracer
        self._client_trace = traces.client_trace
        self._is_known = is_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "HTTP"
        headers = _headers(scope)
        parent = self._client_trace.parent_in(headers)
        if parent and not self._is_known(credentials.shown_in(dict(headers))):
            parent = Context()
        span = self._tracer.start_span(method, parent, kind=SpanKind.SERVER)
        otel_context.attach(trace.set_span_in_context(span))  # for the rest of this task
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        await self._run(span, method, scope, receive, send)

    async def _run(
        self, span: Span, method: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        span.set_attributes(_attributes(scope))
        call = current_call()
        if call is not None and call.client_id is not None:
            span.set_attribute(semconv.CLIENT_REQUEST_ID, call.client_id)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute(semconv.HTTP_STATUS, status)
                if status >= 500:
                    _fail(span, str(status))
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            _fail(span, type(error).__qualname__)
            raise
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute(semconv.HTTP_ROUTE, route)
            span.end()


def _fail(span: Span, error: str) -> None:
    span.set_attribute(semconv.ERROR_TYPE, error)
    span.set_status(Status(StatusCode.ERROR))


def _headers(scope: Scope) -> list[tuple[str, str]]:
    """Returns the headers of a request, with names in lower case."""
    return [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]


def _attributes(scope: Scope) -> Mapping[str, Any]:
    method = scope["method"]
    attributes: dict[str, Any] = {
        semconv.HTTP_METHOD: method if method in METHODS else "_OTHER",
        semconv.URL_PATH: scope["path"],
        semconv.URL_SCHEME: scope["scheme"],
    }
    if scope.get("server") is not None:
        attributes[semconv.SERVER_ADDRESS], port = scope["server"]
        if port is not None:  # a Unix socket has no port
            attributes[semconv.SERVER_PORT] = port
    agent = dict(_headers(scope)).get("user-agent")
    if agent is not None:
        attributes[semconv.USER_AGENT] = agent
    return attributes
