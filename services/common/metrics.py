"""Code for metrics that all services share: the registry, the port for Prometheus, and exemplars.

The port also serves the health, for probes that cannot use gRPC (`health.py`).

There is no global registry: each service makes a registry, passes it on, and registers all its
metrics there. The names of metrics are in `semconv.py`, and `docs/metrics.md` explains them. An
exemplar of a histogram has the ids of the trace and the span to which an observation belongs.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from opentelemetry import trace
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.exposition import choose_encoder

from services.common import address as addresses

# The last bound of each histogram is beyond what its setting allows by default, since no quantile
# can be above it: a request may be held, wait and run for minutes, and an iteration may take 300 s.
CALL_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 180, 600, 1200)
"""Histogram buckets for durations of whole calls and for waiting in the queue, in seconds."""

FIRST_TOKEN_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 10, 30, 90, 300, 1200),
)
"""Histogram buckets for times to the first token, in seconds. Between 0.1 s and 10 s the steps are
small enough for latency objectives."""

PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 15, 120, 1200)
"""Histogram buckets for times per output token, in seconds. The largest buckets are for answers
whose pipeline was lost, because their time includes the wait for another pipeline."""

ITERATION_S = (0.0005, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30, 180, 1200)
"""Histogram buckets for iterations and for parts of an iteration, in seconds."""

BATCH_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
"""Histogram buckets for numbers of requests in a batch."""

TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 32768, 131072, 1048576)
"""Histogram buckets for numbers of tokens, up to the longest context of any model."""


def new_registry() -> CollectorRegistry:
    """Returns a registry that contains only the metrics of the process, such as its memory."""
    disable_created_metrics()  # these would be a second series for each metric
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def exposed(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Returns the metrics in `registry` as text, and the media type of the text. `accept` is the
    header `Accept` of the HTTP request, which determines the format."""
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


HEALTH_PATH = "/health/"

IsHealthy = Callable[[str], bool | None]
"""A function that returns whether the health status of a name is SERVING. Returns None for an
unknown name."""

POLL_S = 0.5
"""Interval in seconds at which the thread of a listener checks whether it must end."""

SILENCE_LIMIT_S = 30.0
"""Timeout in seconds for a client of the metrics that neither sends nor reads. The limit is needed
because each client occupies a thread."""


@contextlib.contextmanager
def listening(
    address: str | None,
    registry: CollectorRegistry,
    *,
    is_healthy: IsHealthy = lambda _: None,
    poll_s: float = POLL_S,
    silence_limit_s: float = SILENCE_LIMIT_S,
) -> Iterator[str | None]:
    """Answers HTTP requests for metrics and health on `address` inside the `with` block. Yields the
    address in use, host:port. If `address` is None, answers nothing and yields None.

    `GET /metrics` returns the metrics in `registry`. The status of `GET /health/NAME` is 200 if
    `is_healthy(NAME)` returns True, 503 if it returns False, and 404 if it returns None.

    Each connection is answered in a thread of its own, so values may change while they are read. At
    its end, the block waits until no more connections are accepted. It does not wait until all
    requests are answered, because it would hold up the event loop in which it ends.

    Raises:
        OSError: the address is taken or is not one of this machine's.
    """
    if address is None:
        yield None
        return
    listeners = addresses.listen(address)
    app = _with_health(make_wsgi_app(registry), is_healthy)
    with contextlib.ExitStack() as serving:
        for listener in listeners:
            server = _Server(listener, app, silence_limit_s=silence_limit_s)
            serving.enter_context(_serving(server, poll_s))
        yield addresses.bound_address(listeners, address)


def _with_health(app: WSGIApplication, is_healthy: IsHealthy) -> WSGIApplication:
    """Returns `app` with the paths `/health/NAME` added."""

    def answer(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = request["PATH_INFO"]
        if not path.startswith(HEALTH_PATH):
            return app(request, start)
        status = {True: "200 OK", False: "503 Service Unavailable", None: "404 Not Found"}[
            is_healthy(path.removeprefix(HEALTH_PATH))
        ]
        start(status, [("Content-Type", "text/plain")])
        return [f"{status}\n".encode()]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server for metrics on a socket that already listens. Each connection has a thread."""

    daemon_threads = True

    def __init__(
        self, listener: socket.socket, app: WSGIApplication, *, silence_limit_s: float
    ) -> None:
        super().__init__(listener.getsockname(), _SilentHandler, bind_and_activate=False)
        self._silence_limit_s = silence_limit_s
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(app)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a client's connection, and sets the timeout after which a silent client is
        dropped."""
        client, name = super().get_request()
        client.settimeout(self._silence_limit_s)
        return client, name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error of a request, unless the client was silent for too long or has
        disconnected."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _SilentHandler(WSGIRequestHandler):
    """A handler that logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


@contextlib.contextmanager
def _serving(server: _Server, poll_s: float) -> Iterator[None]:
    with server:
        thread = threading.Thread(
            target=server.serve_forever, args=(poll_s,), name="metrics", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # systems other than Linux refuse it
                server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            server.shutdown()
            thread.join()


def exemplar() -> dict[str, str] | None:
    """Returns the ids of the current trace and span as an exemplar for a histogram. Returns None if
    the current span is not recorded."""
    context = trace.get_current_span().get_span_context()
    if not context.trace_flags.sampled:
        return None
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }
