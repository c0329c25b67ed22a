"""The span of one client call, over HTTP or gRPC, with the attributes of OpenTelemetry's
conventions for generative AI. The span contains no prompts and no answers."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue
from orcinus.v1 import trace_pb2

from services.common import errors, semconv, tracing
from services.frontend.request.client_call import current_call
from services.frontend.request.conversation import Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationRequest

_OURS = (errors.Unavailable, errors.RequestFailed, errors.StaleEpoch)
"""Errors that are faults of the server. Any other error is a fault of the client, or means that the
client ended the call."""


class RequestSpan:
    """The span of one call. If the call is not recorded, the methods do nothing."""

    def __init__(self, span: Span = INVALID_SPAN) -> None:
        self._span = span
        self._is_recorded = span.is_recording()
        self._started = time.monotonic() if self._is_recorded else 0.0
        self._has_tokens = False
        self._reasons: dict[int, str] = {}

    @property
    def message(self) -> trace_pb2.TraceContext | None:
        """The trace context that the submissions of a recorded call carry. None if the call is not
        recorded."""
        return tracing.to_message(self._span) if self._is_recorded else None

    def checked(self, request: GenerationRequest) -> None:
        """Records the options of a request. Must be called after the request has been checked, when
        its options are known to be valid."""
        if self._is_recorded:
            self._span.set_attributes(_attributes(request))

    def submitted(self, request_id: str, *, model: str, n_prompt_tokens: int) -> None:
        """Notes that the answers are about to be submitted. Their ids begin with `request_id`."""
        if self._is_recorded:
            self._span.set_attributes(
                {
                    semconv.RESPONSE_ID: request_id,
                    semconv.RESPONSE_MODEL: model,
                    semconv.INPUT_TOKENS: n_prompt_tokens,
                }
            )

    def held(self, request_id: str, reason: str) -> None:
        """Notes that an answer waits to be sent to the scheduler. `reason` says why, for example
        because there is no pipeline."""
        self._note(semconv.HELD, request_id, reason)

    def resubmitted(self, request_id: str, reason: str) -> None:
        """Notes that an answer is sent to a scheduler again. `reason` says why the previous attempt
        failed."""
        self._note(semconv.RESUBMITTED, request_id, reason)

    def suspended(self, request_id: str, n_losses: int) -> None:
        """Notes that an answer waits for another pipeline, after `n_losses` consecutive losses of a
        pipeline."""
        if self._is_recorded:
            attributes: dict[str, AttributeValue] = {
                semconv.REQUEST_ID: request_id,
                semconv.REQUEST_LOSSES: n_losses,
            }
            self._span.add_event(semconv.SUSPENDED, attributes)

    def first_token(self) -> None:
        """Notes the time of the first token. May be called whenever tokens come; only the first
        call has an effect."""
        if self._is_recorded and not self._has_tokens:
            self._has_tokens = True
            seconds = time.monotonic() - self._started
            self._span.set_attribute(semconv.TIME_TO_FIRST_CHUNK, seconds)

    def finished(self, index: int, reason: FinishReason) -> None:
        """Notes that an answer is complete."""
        if self._is_recorded:
            self._reasons[index] = reason.value

    def closed(self, n_generated: int) -> None:
        """Records the finish reasons of the answers and the number of their tokens, `n_generated`.
        Must be called when all answers have ended or the call is cancelled. Further calls have no
        effect."""
        if self._is_recorded:
            self._is_recorded = False
            self._span.set_attribute(semconv.OUTPUT_TOKENS, n_generated)
            if self._reasons:
                reasons = [self._reasons[index] for index in sorted(self._reasons)]
                self._span.set_attribute(semconv.FINISH_REASONS, reasons)

    def _note(self, event: str, request_id: str, reason: str) -> None:
        if self._is_recorded:
            attributes = {semconv.REQUEST_ID: request_id, semconv.REASON: reason}
            self._span.add_event(event, attributes)


UNRECORDED = RequestSpan()


def request_span(
    tracer: Tracer, request: GenerationRequest, *, model: str
) -> AbstractContextManager[RequestSpan]:
    """Returns a context manager that records the span of the call inside its block. The call is
    recorded only if the current span, which is the span of the HTTP or gRPC request, is recorded.

    `model` is the name of the served model, or empty. The name in the client's request is not used,
    because clients could invent names.
    """
    if not trace.get_current_span().is_recording():
        return nullcontext(UNRECORDED)
    return _recorded_span(tracer, request, model=model)


@contextmanager
def _recorded_span(
    tracer: Tracer, request: GenerationRequest, *, model: str
) -> Iterator[RequestSpan]:
    is_chat = any(isinstance(prompt, Conversation) for prompt in request.prompts)
    operation = "chat" if is_chat else request.options.operation
    span = tracer.start_span(
        f"{operation} {model}".rstrip(),
        attributes={semconv.OPERATION: operation, semconv.GEN_AI_PROVIDER: semconv.PROVIDER},
    )
    if model:
        span.set_attribute(semconv.REQUEST_MODEL, model)
    call = current_call()
    if call is not None and call.client_id is not None:
        span.set_attribute(semconv.CLIENT_REQUEST_ID, call.client_id)
    try:
        yield RequestSpan(span)
    except errors.OrcinusError as error:
        if isinstance(error, _OURS):
            _fail(span, type(error).__name__)
        else:
            span.add_event(semconv.REFUSED, {semconv.REASON: type(error).__name__})
        raise
    except Exception as error:
        _fail(span, type(error).__qualname__)
        raise
    finally:
        span.end()


def _fail(span: Span, error: str) -> None:
    span.set_attribute(semconv.ERROR_TYPE, error)
    span.set_status(Status(StatusCode.ERROR))


def _attributes(request: GenerationRequest) -> dict[str, AttributeValue]:
    options, sampling = request.options, request.options.sampling
    attributes: dict[str, AttributeValue] = {
        semconv.REQUEST_TEMPERATURE: sampling.temperature,
        semconv.REQUEST_TOP_P: sampling.top_p,
        semconv.REQUEST_SEED: sampling.seed,
    }
    if options.max_tokens is not None:
        attributes[semconv.REQUEST_MAX_TOKENS] = options.max_tokens
    if sampling.top_k > 0:
        attributes[semconv.REQUEST_TOP_K] = sampling.top_k
    if sampling.presence_penalty:
        attributes[semconv.REQUEST_PRESENCE_PENALTY] = sampling.presence_penalty
    if sampling.frequency_penalty:
        attributes[semconv.REQUEST_FREQUENCY_PENALTY] = sampling.frequency_penalty
    if request.n_answers != 1:
        attributes[semconv.REQUEST_CHOICES] = request.n_answers
    if request.resumption is not None:
        attributes[semconv.RESUMED_TOKENS] = request.resumption.n_tokens
    return attributes
