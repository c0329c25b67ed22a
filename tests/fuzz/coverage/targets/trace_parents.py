"""Fuzzing target: the headers with which a client continues its trace."""

from opentelemetry import trace

from services.common import tracing
from services.common.client_trace import ClientTrace
from tests.fuzz.coverage.target import Target


def run(data: bytes) -> None:
    """Reads both headers; whatever they hold, there is a context and a message of it."""
    parent, _, state = data.decode("latin-1").partition("\n")
    headers = [("traceparent", parent), *(("tracestate", it) for it in state.split("\n"))]
    context = ClientTrace().parent_in(headers)
    span = trace.get_current_span(context)
    tracing.from_message(tracing.to_message(span))


TARGET = Target(
    run=run,
    seeds=[
        f"00-{'0af7651916cd43dd8448eb211c80319c'}-b7ad6b7169203331-{flags}\n{state}".encode()
        for flags in ("00", "01", "ff")
        for state in ("", "a=1,b=2", "congo=t61rcWkgMzE")
    ],
    words=["00-", "-01", "ff-", "0" * 32, "0" * 16, "=", ","],
    max_bytes=1024,
)
