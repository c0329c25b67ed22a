"""Reads the trace context that a client sends in HTTP headers or gRPC metadata.

The variable `OTEL_PROPAGATORS` selects the formats of contexts that are read. Two rules of W3C
Trace Context apply to all formats. A list may be divided among several headers with one name, and
is joined in their order. If a header that may occur only once occurs several times, the context is
ambiguous and the request begins a new trace.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.b3 import B3MultiFormat, B3SingleFormat
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

DEFAULT = "tracecontext,baggage"


@dataclass(frozen=True, slots=True)
class _Form:
    """A format in which clients send a trace context: the code that reads it, and the names of its
    headers."""

    propagator: Callable[[], TextMapPropagator]
    once: frozenset[str] = frozenset()
    """Names of headers that may occur only once."""
    lists: frozenset[str] = frozenset()
    """Names of headers whose values are lists, separated by commas."""


_B3 = frozenset({"b3", "x-b3-traceid", "x-b3-spanid", "x-b3-sampled", "x-b3-flags"})
FORMS: Mapping[str, _Form] = {
    "tracecontext": _Form(
        TraceContextTextMapPropagator, frozenset({"traceparent"}), frozenset({"tracestate"})
    ),
    "baggage": _Form(W3CBaggagePropagator, lists=frozenset({"baggage"})),
    "b3": _Form(B3SingleFormat, _B3),
    "b3multi": _Form(B3MultiFormat, _B3),
}
"""The formats, by their names in `OTEL_PROPAGATORS`."""


class ClientTrace:
    """Reads the trace contexts of clients, in the formats that `OTEL_PROPAGATORS` names."""

    def __init__(self, names: str = DEFAULT) -> None:
        """`names` is a value of `OTEL_PROPAGATORS`: names of formats, separated by commas, or
        `none`."""
        wanted = [name.strip().lower() for name in names.split(",")]
        forms = [] if "none" in wanted else [FORMS[name] for name in wanted]
        self._propagator = CompositePropagator([form.propagator() for form in forms])
        self._once = frozenset[str]().union(*(form.once for form in forms))
        self.headers = self._once.union(*(form.lists for form in forms))
        """Names of the headers that are read. The names are in lower case."""

    def parent_in(self, headers: Iterable[tuple[str, str]]) -> Context:
        """Returns the trace context that a client has sent in HTTP headers or gRPC metadata.
        `headers` are pairs of a name in lower case and a value, in the order of their arrival.

        If the client sends no context, or an ambiguous one, the result is empty. The request then
        begins a new trace.
        """
        carrier: dict[str, Sequence[str]] = {}
        for name, value in headers:
            if name not in self.headers:
                continue
            if name not in carrier:
                carrier[name] = [value]
            elif name in self._once:
                return Context()
            else:
                carrier[name] = [f"{carrier[name][0]},{value}"]
        return self._propagator.extract(carrier, Context())
