"""Traces of requests: one span for each phase of those whose frontend records them.

    queue → prefill → decode

They are children of the frontend's span of the request, which comes with the submission, and are
made when the request ends: until then it costs a few numbers, and others nothing.
"""

import time
from collections import deque
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue
from orcinus.v1 import scheduler_pb2

from services.common import semconv, tracing
from services.common.errors import OrcinusError
from services.scheduler.core.request import FinishReason, Request

UNAVAILABLE = "UNAVAILABLE"

_SECONDS = {
    semconv.QUEUE: semconv.TIME_IN_QUEUE,
    semconv.PREFILL: semconv.TIME_IN_PREFILL,
    semconv.DECODE: semconv.TIME_IN_DECODE,
}


class RequestTrace:
    """The phases of a request that is recorded. Points in time are nanoseconds since 1970."""

    def __init__(self, submission: scheduler_pb2.Submission, now_ns: int) -> None:
        self.parent: Context = tracing.from_message(submission.trace)
        self.phases: list[_Phase] = [_Phase(semconv.QUEUE, now_ns)]
        self._early_decodes: list[SpanContext] = []  # sent before the first token was back

    def enter(self, phase: str, now_ns: int) -> None:
        """Ends one phase of the request and begins the next."""
        self.phases[-1].end_ns = now_ns
        self.phases.append(_Phase(phase, now_ns))
        if phase == semconv.DECODE:
            self.phases[-1].iterations.extend(self._early_decodes)

    def ride(self, iteration: SpanContext, *, is_prefill: bool) -> None:
        """Adds a recorded iteration that the request is, or was, in."""
        name = semconv.PREFILL if is_prefill else semconv.DECODE
        phase = next((phase for phase in self.phases if phase.name == name), None)
        if phase is not None:
            phase.iterations.append(iteration)
        elif not is_prefill:
            self._early_decodes.append(iteration)


class _Phase:
    def __init__(self, name: str, start_ns: int) -> None:
        self.name = name
        self.start_ns = start_ns
        self.end_ns = start_ns
        # Only the last ones are kept: a span holds no more links.
        self.iterations: deque[SpanContext] = deque(maxlen=tracing.MAX_LINKS)


class RequestTracer:
    """A request observer that makes spans."""

    def __init__(self, tracer: Tracer, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.traces: dict[Request, RequestTrace] = {}
        """The recorded requests that have not ended."""
        self._tracer = tracer
        self._clock_ns = clock_ns

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None:
        """Begins the phase `queue`."""
        if submission.HasField("trace"):
            self.traces[request] = RequestTrace(submission, self._clock_ns())

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None:
        """Notes nothing: the frontend's span says so."""

    def admitted(self, request: Request) -> None:
        """Begins the phase `prefill`."""
        trace = self.traces.get(request)
        if trace is not None:
            trace.enter(semconv.PREFILL, self._clock_ns())

    def first_token(self, request: Request) -> None:
        """Begins the phase `decode`."""
        trace = self.traces.get(request)
        if trace is not None:
            trace.enter(semconv.DECODE, self._clock_ns())

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Makes the spans of a request that has finished or was cancelled."""
        trace = self.traces.get(request)
        has_all = reason is not FinishReason.CANCELLED
        if trace is not None and has_all and len(request.generated_token_ids) == 1:
            trace.phases.pop()  # it needed no more than its first token
        self._end(request, reason.name.lower(), error=None)

    def failed(self, request: Request) -> None:
        """Makes the spans of a request that could not be finished."""
        self._end(request, "unavailable", error=UNAVAILABLE)

    def _end(self, request: Request, end: str, *, error: str | None) -> None:
        trace = self.traces.pop(request, None)
        if trace is None:
            return
        last = trace.phases[-1]
        last.end_ns = self._clock_ns()
        n_generated = len(request.generated_token_ids)
        n_tokens = {semconv.PREFILL: request.n_prompt_tokens, semconv.DECODE: n_generated - 1}
        for phase in trace.phases:
            is_last = phase is trace.phases[-1]
            attributes: dict[str, AttributeValue] = {
                semconv.REQUEST_ID: request.request_id,
                _SECONDS[phase.name]: (phase.end_ns - phase.start_ns) / 1e9,
            }
            if phase.name in n_tokens:
                attributes[semconv.N_TOKENS] = n_tokens[phase.name]
            if is_last:
                attributes[semconv.REQUEST_END] = end
            span = self._tracer.start_span(
                phase.name,
                trace.parent,
                attributes=attributes,
                links=[Link(iteration) for iteration in phase.iterations],
                start_time=phase.start_ns,
            )
            if phase.name == semconv.PREFILL and n_generated:
                span.add_event(semconv.FIRST_TOKEN, timestamp=phase.end_ns)
            if is_last and error is not None:
                span.set_attribute(semconv.ERROR_TYPE, error)
                span.set_status(Status(StatusCode.ERROR))
            span.end(phase.end_ns)
