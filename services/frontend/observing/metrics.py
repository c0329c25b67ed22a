"""The metrics of a frontend: the calls of clients, as clients see them, and the answers.

The histograms follow OpenTelemetry's conventions for generative AI. Only their buckets differ: they
reach as far as the longest call. If the trace of a call is recorded, the histograms get the id of
the trace as an exemplar. Tokens are counted only for calls whose answers are all complete, like the
usage that clients see.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import errors, rpc_handlers, semconv
from services.common.metrics import CALL_S, FIRST_TOKEN_S, PER_TOKEN_S, exemplar
from services.common.own_metrics import Counter, Histogram
from services.frontend.request.conversation import Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.request.refusals import Refusal

CALL_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
CANCELLED = errors.RequestCancelled.__name__
OTHER_ERROR = "_OTHER"
CLIENT_CLOSED_REQUEST = 499
OTHER_ROUTE = "other"


class MeasuredCall:
    """The measurements of one client call while it runs."""

    def __init__(self, n_answers: int) -> None:
        self._n_answers = n_answers
        self._started_at = perf_counter()
        self._first_token_at: dict[int, float] = {}
        self.answers: list[tuple[FinishReason, float, int, int]] = []
        """For each complete answer: the finish reason, the seconds from its first token in this
        call to its end, the number of its tokens, and the number of its tokens that came in this
        call."""
        self.n_prompt_tokens = 0
        self.checked_values: list[bool | None] = []
        """For each complete answer with values to check, whether the values match their JSON
        schemas, or None if the check was not possible."""

    @property
    def is_complete(self) -> bool:
        """Whether all answers of the call are complete."""
        return len(self.answers) == self._n_answers

    @property
    def elapsed_s(self) -> float:
        return perf_counter() - self._started_at

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the start of the call to the first token of any answer, or None before the
        first token."""
        first = min(self._first_token_at.values(), default=None)
        return None if first is None else first - self._started_at

    def took_tokens(self, index: int) -> None:
        """Notes that an answer has received tokens."""
        if index not in self._first_token_at:
            self._first_token_at[index] = perf_counter()

    def finished(
        self, index: int, reason: FinishReason, *, n_tokens: int, n_resumed: int = 0
    ) -> None:
        """Notes that an answer is complete. `n_resumed` of its `n_tokens` tokens came in an earlier
        call."""
        now = perf_counter()
        elapsed_s = now - self._first_token_at.get(index, now)
        self.answers.append((reason, elapsed_s, n_tokens, n_tokens - n_resumed))


class FrontendMetrics:
    """All metrics of one frontend process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._duration = Histogram(
            semconv.SERVER_REQUEST_DURATION,
            "Seconds of a client call.",
            [*CALL_LABELS, "error_type"],
            buckets=CALL_S,
            registry=registry,
        )
        self._first_token = Histogram(
            semconv.SERVER_TIME_TO_FIRST_TOKEN,
            "Seconds until a client call has its first token.",
            CALL_LABELS,
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._per_token = Histogram(
            semconv.SERVER_TIME_PER_OUTPUT_TOKEN,
            "Seconds for each token of a complete answer after its first.",
            CALL_LABELS,
            buckets=PER_TOKEN_S,
            registry=registry,
        )
        usage = Counter(
            semconv.USAGE_TOKENS,
            "Tokens of complete calls, as clients are told.",
            ["gen_ai_token_type"],
            registry=registry,
        )
        self._input, self._output = usage.labels("input"), usage.labels("output")
        finished = Counter(
            semconv.ANSWERS_FINISHED, "Complete answers.", ["reason"], registry=registry
        )
        self._finished = {reason: finished.labels(reason.value) for reason in FinishReason}
        checked = Counter(
            semconv.VALUES_CHECKED,
            "Answers whose values were checked against JSON schemas.",
            ["result"],
            registry=registry,
        )
        results = {True: "valid", False: "invalid", None: "unknown"}
        self._checked = {verdict: checked.labels(name) for verdict, name in results.items()}
        self._resumed = Counter(
            semconv.ANSWERS_RESUMED,
            "Answers whose client came back for the rest of a stream that broke.",
            registry=registry,
        )
        self._http = Counter(
            semconv.HTTP_REQUESTS, "HTTP requests answered.", ["route", "status"], registry=registry
        )
        self._grpc = Counter(
            semconv.GRPC_CALLS, "gRPC calls answered.", ["method", "code"], registry=registry
        )

    @contextmanager
    def call(self, request: GenerationRequest, *, model: str) -> Iterator[MeasuredCall]:
        """Measures the call that runs inside the `with` block."""
        call = MeasuredCall(request.n_answers)
        if request.resumption is not None:
            self._resumed.inc(len(request.resumption.answers))
        error_type = OTHER_ERROR
        try:
            yield call
            error_type = "" if call.is_complete else CANCELLED
        except errors.OrcinusError as error:
            error_type = type(error).__name__
            raise
        except (asyncio.CancelledError, GeneratorExit):
            error_type = CANCELLED
            raise
        finally:
            is_chat = any(isinstance(prompt, Conversation) for prompt in request.prompts)
            operation = "chat" if is_chat else request.options.operation
            self._note(call, (operation, semconv.PROVIDER, model), error_type)

    def counted(self, observe: rpc_handlers.Observe | None) -> rpc_handlers.Observe:
        """Returns an observer of gRPC calls that counts each call, and calls `observe` if it is
        given."""

        @contextmanager
        def around(method: str, context: Any) -> Iterator[None]:
            ending: BaseException | None = None
            try:
                with nullcontext() if observe is None else observe(method, context):
                    yield
            except BaseException as error:
                ending = error
                raise
            finally:
                code = rpc_handlers.status_of(ending, context)
                self._grpc.labels(method.rpartition("/")[2], code.name).inc()

        return around

    def count_http(self, route: str, status: int) -> None:
        """Counts an HTTP request that has ended."""
        self._http.labels(route, str(status)).inc()

    def _note(self, call: MeasuredCall, labels: tuple[str, ...], error_type: str) -> None:
        trace = exemplar()
        self._duration.labels(*labels, error_type).observe(call.elapsed_s, trace)
        first_token_s = call.time_to_first_token_s
        if first_token_s is not None:
            self._first_token.labels(*labels).observe(first_token_s, trace)
        for verdict in call.checked_values:
            self._checked[verdict].inc()
        if error_type:
            return
        self._input.inc(call.n_prompt_tokens)
        for reason, seconds, n_tokens, n_new in call.answers:
            self._finished[reason].inc()
            self._output.inc(n_tokens)
            if n_new > 1:
                self._per_token.labels(*labels).observe(seconds / (n_new - 1), trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """The present figures of one model that this frontend serves."""

    name: str
    """Name of the model, which is the label `model` of its metrics."""
    is_up: bool
    """Whether a pipeline serves the model."""
    n_held: int
    """Number of answers that wait to be sent to the scheduler, mostly because there is no
    pipeline."""
    n_resubmitted: int
    """Number of times that an answer was sent to a scheduler again."""
    n_viewers: int
    """Number of viewers that watch the scheduler of the model."""


class FrontendState(Collector):
    """A collector that reads the present state of the frontend whenever Prometheus scrapes."""

    def __init__(
        self,
        *,
        models: Callable[[], Sequence[ModelFigures]],
        n_in_flight: Callable[[], int],
        reason_against_serving: Callable[[], str],
        refusals: Mapping[Refusal, int],
    ) -> None:
        """`models`, `n_in_flight` and `reason_against_serving` return the present values, and may
        be called from any thread. `refusals` counts the refused clients by reason."""
        self._models = models
        self._n_in_flight = n_in_flight
        self._reason_against_serving = reason_against_serving
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges and counters. Runs in the thread that answers Prometheus."""
        models = self._models()
        yield GaugeMetricFamily(
            semconv.SERVING,
            "1 while requests that come now get tokens.",
            int(not self._reason_against_serving()),
        )
        yield GaugeMetricFamily(
            semconv.ANSWERS_IN_FLIGHT, "Answers in the making.", self._n_in_flight()
        )
        up = GaugeMetricFamily(
            semconv.FRONTEND_PIPELINE_UP,
            "1 while this frontend knows of a pipeline of the model.",
            labels=["model"],
        )
        held = GaugeMetricFamily(
            semconv.ANSWERS_HELD, "Answers that wait for a pipeline.", labels=["model"]
        )
        viewers = GaugeMetricFamily(
            semconv.VIEWERS, "Streams of what the scheduler does.", labels=["model"]
        )
        resubmitted = CounterMetricFamily(
            semconv.ANSWERS_RESUBMITTED, "Answers sent to a scheduler again.", labels=["model"]
        )
        for model in models:
            up.add_metric([model.name], int(model.is_up))
            held.add_metric([model.name], model.n_held)
            viewers.add_metric([model.name], model.n_viewers)
            resubmitted.add_metric([model.name], model.n_resubmitted)
        yield from (up, held, viewers, resubmitted)
        refusals = CounterMetricFamily(
            semconv.REFUSALS, "Clients refused, or cut off.", labels=["reason"]
        )
        for reason, n_calls in list(self._refusals.items()):
            refusals.add_metric([reason], n_calls)
        yield refusals


class CountedApp:
    """An ASGI app that wraps another app and counts its requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_CLOSED_REQUEST  # if the client goes before the answer begins

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            # Clients may invent paths: all that have no route count as one.
            route = getattr(scope.get("route"), "path", OTHER_ROUTE)
            self._metrics.count_http(route, status)
