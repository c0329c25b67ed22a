"""Traces of requests: a span for each phase of a request, if the frontend records the request.

    queue → prefill → decode (→ suspended → prefill → decode)

A request whose pipeline is lost is suspended until another pipeline runs it. The spans of the
phases `prefill` and `decode` have the numbers of their epoch and of their pipeline, so a trace
shows which pipelines have run the request. The spans of phases are children of the frontend's span
of the request, whose context comes with the submission. The spans of phases are made when the
request ends. Until then only a few numbers are kept for a recorded request, and nothing for any
other request.
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

UNAVAILABLE, FAILED = "UNAVAILABLE", "FAILED"

Attributes = dict[str, AttributeValue]

_SECONDS = {
    semconv.QUEUE: semconv.TIME_IN_QUEUE,
    semconv.PREFILL: semconv.TIME_IN_PREFILL,
    semconv.DECODE: semconv.TIME_IN_DECODE,
    semconv.SUSPENDED: semconv.TIME_SUSPENDED,
}


class RequestTrace:
    """The phases of a recorded request. Points in time are nanoseconds since 1970."""

    def __init__(self, submission: scheduler_pb2.Submission, now_ns: int) -> None:
        self.parent: Context = tracing.from_message(submission.trace)
        self.phases: list[_Phase] = [_Phase(semconv.QUEUE, now_ns, {})]
        self.n_generated = 0
        """Number of generated tokens when the last phase `decode` began."""
        self._early_decodes: list[SpanContext] = []  # decodes sent before the first token came
        self._place: Attributes = {}  # names the epoch and the pipeline that run the request

    def enter(self, phase: str, now_ns: int, attributes: Attributes) -> None:
        """Ends the present phase of the request and begins `phase`."""
        self.phases[-1].end_ns = now_ns
        self.phases.append(_Phase(phase, now_ns, attributes))
        if phase == semconv.DECODE:
            self.phases[-1].iterations.extend(self._early_decodes)
            self.phases[-1].attributes.update(self._place)
        self._early_decodes.clear()

    def run_in(self, place: Attributes) -> None:
        """Notes the epoch and the pipeline that have admitted the request. `place` has their
        attributes. The present phase must be `prefill`."""
        self._place = place
        self.phases[-1].attributes.update(place)

    def ride(self, iteration: SpanContext, *, is_prefill: bool) -> None:
        """Adds a link to the span of a recorded iteration whose batch has the request."""
        name = semconv.PREFILL if is_prefill else semconv.DECODE
        phase = next((phase for phase in self.phases[:-3:-1] if phase.name == name), None)
        if phase is not None:
            phase.iterations.append(iteration)
        elif not is_prefill:
            self._early_decodes.append(iteration)


class _Phase:
    def __init__(self, name: str, start_ns: int, attributes: Attributes) -> None:
        self.name = name
        self.attributes = attributes
        self.has_first_token = False
        self.build = ""  # of the workers that compute
        self.left_build: str | None = None  # that made the tokens so far, if it is another one
        self.start_ns = start_ns
        self.end_ns = start_ns
        # Only the last iterations are kept: a span has at most MAX_LINKS links.
        self.iterations: deque[SpanContext] = deque(maxlen=tracing.MAX_LINKS)


class RequestTracer:
    """A request observer that makes the spans of recorded requests."""

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
        """Does nothing: the frontend's span shows the rejection."""

    def admitted(self, request: Request) -> None:
        """Begins the phase `prefill`."""
        trace = self.traces.get(request)
        if trace is not None:
            attributes: Attributes = {semconv.N_TOKENS: request.n_prefill_tokens}
            trace.enter(semconv.PREFILL, self._clock_ns(), attributes)
            trace.phases[-1].left_build = request.left_build
            trace.phases[-1].build = request.build

    def first_token(self, request: Request) -> None:
        """Begins the phase `decode`."""
        trace = self.traces.get(request)
        if trace is not None:
            trace.phases[-1].has_first_token = True
            trace.n_generated = len(request.generated_token_ids)
            trace.enter(semconv.DECODE, self._clock_ns(), {})

    def suspended(self, request: Request) -> None:
        """Begins the phase `suspended`."""
        trace = self.traces.get(request)
        if trace is not None:
            _count_decoded(trace, request)
            trace.enter(
                semconv.SUSPENDED, self._clock_ns(), {semconv.REQUEST_LOSSES: request.n_losses}
            )

    def preempted(self, request: Request) -> None:
        """Begins another phase `queue`."""
        trace = self.traces.get(request)
        if trace is not None:
            _count_decoded(trace, request)
            trace.enter(semconv.QUEUE, self._clock_ns(), {})

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Makes the spans of a request that has finished, was cancelled or can't be served."""
        trace = self.traces.get(request)
        has_all = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if trace is not None and has_all and request.n_new_tokens == 1:
            trace.phases.pop()  # the request ended with its first token
        error = FAILED if reason is FinishReason.FAILED else None
        self._end(request, reason.name.lower(), error=error)

    def failed(self, request: Request) -> None:
        """Makes the spans of a request that ended with the status UNAVAILABLE."""
        self._end(request, "unavailable", error=UNAVAILABLE)

    def _end(self, request: Request, end: str, *, error: str | None) -> None:
        trace = self.traces.pop(request, None)
        if trace is None:
            return
        _count_decoded(trace, request)
        last = trace.phases[-1]
        last.end_ns = self._clock_ns()
        for phase in trace.phases:
            is_last = phase is last
            attributes: Attributes = {
                semconv.REQUEST_ID: request.request_id,
                _SECONDS[phase.name]: (phase.end_ns - phase.start_ns) / 1e9,
                **phase.attributes,
            }
            if is_last:
                attributes[semconv.REQUEST_END] = end
            span = self._tracer.start_span(
                phase.name,
                trace.parent,
                attributes=attributes,
                links=[Link(iteration) for iteration in phase.iterations],
                start_time=phase.start_ns,
            )
            if phase.left_build is not None:
                builds = {semconv.BUILD: phase.build, semconv.LEFT_BUILD: phase.left_build}
                span.add_event(semconv.BUILD_CHANGED, builds, timestamp=phase.start_ns)
            if phase.has_first_token:
                span.add_event(semconv.FIRST_TOKEN, timestamp=phase.end_ns)
            if is_last and error is not None:
                span.set_attribute(semconv.ERROR_TYPE, error)
                span.set_status(Status(StatusCode.ERROR))
            span.end(phase.end_ns)


def _count_decoded(trace: RequestTrace, request: Request) -> None:
    phase = trace.phases[-1]
    if phase.name == semconv.DECODE:
        n_tokens = len(request.generated_token_ids) - trace.n_generated
        phase.attributes[semconv.N_TOKENS] = n_tokens
