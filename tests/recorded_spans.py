"""A tracer whose spans end in a list, for tests of spans."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from services.common.tracing import Tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"


class RecordedSpans:
    """The spans that code under test records, kept in memory."""

    def __init__(self, root: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(root), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider, self._exporter)
        self.tracer = self.tracing.tracer

    def all(self) -> tuple[ReadableSpan, ...]:
        """Returns the spans that have ended, in the order of their ends."""
        return self._exporter.get_finished_spans()

    def names(self) -> list[str]:
        """Returns the names of the spans that have ended, in the order of their ends."""
        return [span.name for span in self.all()]

    def one(self, name: str) -> ReadableSpan:
        """Returns the ended span with a name. There must be exactly one."""
        [span] = [span for span in self.all() if span.name == name]
        return span

    def clear(self) -> None:
        """Forgets all ended spans."""
        self._exporter.clear()


def attributes(span: ReadableSpan) -> dict[str, object]:
    """Returns the attributes of a span."""
    return dict(span.attributes or {})


def parent_id(span: ReadableSpan) -> str:
    """Returns the id of a span's parent, in hexadecimal. Empty if the span has no parent."""
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def span_id(span: ReadableSpan) -> str:
    """Returns the id of a span, in hexadecimal."""
    return "" if span.context is None else f"{span.context.span_id:016x}"


def trace_id(span: ReadableSpan) -> str:
    """Returns the id of the trace to which a span belongs, in hexadecimal."""
    return "" if span.context is None else f"{span.context.trace_id:032x}"
