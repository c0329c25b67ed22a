"""The implementation that all protocols share, for one model.

    wait → check → submit → assemble → cancel

A request is checked here and turned into tokens (`RequestEncoder`); a `Generation` does the rest.
`open` is the only way to get a `Generation`. When the client's call ends, for whatever reason,
`open` cancels the answers that still run.

While there is no pipeline, requests wait for one up to `hold_s` seconds, for example while another
scheduler takes the lead or the pipeline forms again. They wait up to `wake_s` seconds for a model
that is asleep or starts. A client sees only a pause. Meanwhile, questions about the model are
answered with the last known pipeline, because the next pipeline serves the same model.

`TokenService` serves requests that need only the tokenizer.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from services.common.model_task import ModelTask
from services.frontend.api_keys import Account
from services.frontend.generation.admission import Admission
from services.frontend.generation.call_deadline import by_deadline, call_deadline
from services.frontend.generation.call_resources import CallResources
from services.frontend.generation.encoded_call import EncodedCall
from services.frontend.generation.generation import Generation
from services.frontend.generation.known_limits import KnownLimits
from services.frontend.generation.model_profile import ModelProfile
from services.frontend.generation.receipts import CallReceipts, MakeReceipts
from services.frontend.generation.request_encoder import RequestEncoder
from services.frontend.generation.request_memory import encoded_bytes, vector_bytes
from services.frontend.generation.service_limits import ServiceLimits
from services.frontend.generation.token_service import TokenService
from services.frontend.link.known_pipeline import ModelState
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.observing.metrics import FrontendMetrics, MeasuredCall
from services.frontend.observing.request_span import RequestSpan, request_span
from services.frontend.request.client_call import current_call
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.frontend.request.pipeline import ServedPipeline
from services.frontend.request.request_id import new_request_id
from services.frontend.request.vector_defaults import VectorDefaults
from services.frontend.text.bad_words import with_bad_words
from services.frontend.text.grammar_check import GrammarCheck
from services.frontend.text.pair_format import PairFormat
from services.frontend.text.prompt_encoder import PromptEncoder
from services.frontend.text.text_threads import TextThreads
from services.frontend.text.tokenizer import Tokenizer


class GenerationService:
    """Serves the requests of all protocols to one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheduler: SchedulerClient,
        *,
        profile: ModelProfile | None = None,
        limits: ServiceLimits | None = None,
        admission: Admission | None = None,
        threads: TextThreads | None = None,
        tracer: Tracer | None = None,
        metrics: FrontendMetrics | None = None,
    ) -> None:
        """`admission` and `threads` belong to the whole process: all of its models share them."""
        self.tokenizer = tokenizer
        self._profile = profile = profile or ModelProfile()
        self._limits = limits = limits or ServiceLimits()
        self._admission = admission = admission or Admission()
        self._tracer = tracer or NoOpTracer()
        self._metrics = metrics or FrontendMetrics(CollectorRegistry())
        self._scheduler = scheduler
        self._prompt_encoder = PromptEncoder(
            tokenizer,
            profile.chat_template,
            limits.texts,
            threads=threads or TextThreads(admission.refusals),
            refusals=admission.refusals,
        )
        self._request_encoder = RequestEncoder(
            self._prompt_encoder,
            grammar_check=GrammarCheck(profile.tokenizer_file, admission.refusals),
            message_format=profile.message_format(tokenizer),
        )
        self._known_limits = KnownLimits(
            scheduler.pipeline, profile.names, strict_max_tokens=limits.strict_max_tokens
        )
        self.tokens = TokenService(
            tokenizer,
            self._prompt_encoder,
            limits=self._known_limits,
            admission=admission,
            max_request_s=limits.max_request_s,
        )
        """Service for the requests that need only the tokenizer."""
        self._anybody = Account()
        self.n_waiting = 0
        """Number of answers that wait for a pipeline."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template. Without one, conversations are refused."""
        return self._profile.chat_template is not None

    @property
    def task(self) -> ModelTask:
        """The kind of request that an example for the model shows. It is `scores` or `vectors` if
        the current or last pipeline makes nothing else. Otherwise it is `chat` if the model has a
        chat template, and `text` if not."""
        limits = self._known_limits.last()
        pooling = None if limits is None else limits.pooling
        if pooling is not None and not pooling.generates:
            return "scores" if pooling.makes_scores else "vectors"
        return "chat" if self.has_chat_template else "text"

    @property
    def vectors(self) -> VectorDefaults:
        """The prompts for embeddings and the allowed lengths of embeddings, as the checkpoint's
        files declare them."""
        return self._profile.vectors

    @property
    def pairs(self) -> PairFormat:
        """The format of the prompt in which the model compares two texts."""
        return self._profile.pairs

    @property
    def takes_requests(self) -> bool:
        """Whether new requests are served: this process does not refuse them, and there is a
        pipeline or one is likely to form while the requests wait."""
        return not self._admission.is_stopping and _now() < self._scheduler.pipeline.hold_deadline(
            self._limits.hold_s
        )

    async def wait_taking(self, takes_requests: bool) -> None:
        """Waits until the property `takes_requests` has the given value. A call of
        `Admission.refuse_new` does not end the wait."""
        while self.takes_requests is not takes_requests:
            deadline = self._scheduler.pipeline.hold_deadline(self._limits.hold_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline if _now() < deadline < math.inf else None):
                    await self._scheduler.pipeline.wait_change()

    def describe(self, model: str = "") -> ServedPipeline:
        """Returns the current pipeline, or the last pipeline if there is none now.

        Raises:
            Unavailable: there has been no pipeline yet.
            UnknownModel: `model` is neither empty nor a name of this model.
        """
        return self._known_limits.describe(model)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names by which clients know the model. Answers show the first name. Raises Unavailable if
        the settings give no name and there has been no pipeline."""
        return self._profile.names or (self.describe().model,)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that clients may select in place of the model. Empty before
        the first pipeline. An adapter with a name of the model itself is left out."""
        limits = self._known_limits.last()
        if limits is None:
            return ()
        return tuple(name for name in limits.pipeline.adapters if name not in limits.names)

    @property
    def model_state(self) -> ModelState:
        """State of the model: whether a pipeline serves it and, if not, why."""
        return self._scheduler.pipeline.state

    @property
    def model_created(self) -> int:
        """Time at which the model's files were written, in seconds since 1970."""
        return self._profile.created

    def check_room(self, account: Account) -> None:
        """Checks that the limits on answers in flight allow a new call, and that a request with the
        best priority of the account would not wait too long. Call this method before any other work
        is done for the call. Calls that resume a broken stream need no check.

        Raises:
            PoolFull: there are too many calls at once, or the wait would be too long.
            Unavailable: this process is stopping.
        """
        self._admission.check_room()
        self._scheduler.check_room()
        self._scheduler.check_time(account.name, account.min_priority)

    @asynccontextmanager
    async def open(
        self, request: GenerationRequest, account: Account | None = None
    ) -> AsyncIterator[Generation]:
        """Prepares a generation as `prepare` does, and yields it when the scheduler has accepted
        its first answers.

        Raises:
            InvalidRequest: the request breaks a rule.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over. Within the context, reading pieces raises
            this error.
            Unavailable: no pipeline came in time, or this process is stopping.
        """
        async with self.prepare(request, account) as generation:
            await generation.start()
            yield generation

    @asynccontextmanager
    async def prepare(
        self, request: GenerationRequest, account: Account | None = None
    ) -> AsyncIterator[Generation]:
        """Yields a generation whose request has been checked and whose prompts have been encoded.
        The caller starts the generation. At the end of the context, cancels the answers that still
        run. The answers count against the limits of the account until the scheduler has ended them.
        The id and the time limit of the generation come from the client call that this task serves
        (`current_call`).

        Raises:
            InvalidRequest: the request breaks a rule.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over. Within the context, the generation raises
            this error.
            Unavailable: no pipeline came in time, or this process is stopping.
        """
        until = _now() + self._hold_s
        options = self._profile.applied(request.options)
        if options is not request.options:
            request = replace(request, options=options)
        model = next(iter(self._profile.names), self._scheduler.pipeline.last_model)
        with (
            self._metrics.call(request, model=model) as call,
            request_span(self._tracer, request, model=model) as span,
        ):
            request.check()
            deadline = call_deadline(self._limits.max_request_s)
            span.checked(request)
            account = account or self._anybody
            if request.resumption is None:
                self._scheduler.check_time(account.name, request.options.priority)
            if (limits := self._known_limits.last()) is not None:
                limits.check_kind(request.options)
            self._prompt_encoder.check_length(request, limits)
            with self._admission.admitted(request, account) as resources:
                generation = await by_deadline(
                    deadline, self._generation(request, until, resources, span, call)
                )
                try:
                    if deadline is not None:
                        generation.end_at(deadline)
                    yield generation
                finally:
                    generation.close()

    @property
    def _hold_s(self) -> float:
        """Seconds that a request waits for a pipeline."""
        is_sleeping = self._scheduler.pipeline.is_sleeping
        return self._limits.wake_s if is_sleeping else self._limits.hold_s

    async def _generation(
        self,
        request: GenerationRequest,
        until: float,
        resources: CallResources,
        span: RequestSpan,
        call: MeasuredCall,
    ) -> Generation:
        was_held = not self._scheduler.pipeline.is_open
        self.n_waiting += request.n_answers
        try:
            pipeline = await self._scheduler.pipeline.wait_open(until)
        finally:
            self.n_waiting -= request.n_answers
        limits = self._known_limits.of(pipeline)
        adapter = limits.adapter(request.model)
        make_receipts = self._receipts_of(request.options, pipeline, limits.names[0])
        if make_receipts is None and request.options.receipt:
            request = replace(request, options=replace(request.options, receipt=False))
        request = with_bad_words(request, self.tokenizer)
        if request.options.wants_vector and limits.pooling is not None:
            # Before any work: a vector that has been made is never lost for lack of memory.
            resources.share.grow(vector_bytes(request.n_answers, limits.pooling.n_values))
        prompts = await self._request_encoder.encode(request, limits, resources.share)
        n_at_once = self._admission.max_answers_at_once
        resources.share.grow(encoded_bytes(prompts, request.options, max_at_once=n_at_once))
        encoded = EncodedCall(
            request_id=_request_id(request),
            options=request.options,
            prompts=prompts,
            tokenizer=self.tokenizer,
            model=pipeline.model,
            shown_model=limits.names[0] if adapter is None else adapter.name,
            until=until,
            was_held=was_held,
            resumption=request.resumption,
            adapter=adapter,
            pooling=limits.pooling,
        )
        return Generation(
            encoded,
            self._scheduler,
            resources=resources,
            span=span,
            measured=call,
            check_value=partial(
                self._request_encoder.check_value, limits=limits, share=resources.share
            ),
            make_receipts=make_receipts,
        )

    def _receipts_of(
        self, options: GenerationOptions, pipeline: ServedPipeline, model: str
    ) -> MakeReceipts | None:
        """Returns a function that makes the receipts of a call. Returns None if the answers get no
        receipts.

        Raises:
            InvalidRequest: the client asks for receipts, but the workers of the pipeline do not
            report their traits (the model and the arithmetic that they compute with), which
            receipts contain.
        """
        issuer, is_optional = self._profile.receipts, options.is_receipt_optional
        if issuer is None or not options.receipt or options.wants_vector:
            return None
        if not issuer.can_serve(pipeline, is_optional=is_optional):
            return None
        return lambda answers, request_id, keep: CallReceipts(
            issuer,
            answers,
            request_id=request_id,
            model=model,
            pipeline=pipeline,
            keep=keep,
            is_optional=is_optional,
        )


def _request_id(request: GenerationRequest) -> str:
    """Returns the id of the stream that a request resumes. If it resumes none, returns the id of
    the client call that this task serves, or a new id if there is no such call."""
    if request.resumption is not None:
        return request.resumption.request_id
    client_call = current_call()
    own = None if client_call is None else client_call.request_id
    return own or new_request_id()


def _now() -> float:
    return asyncio.get_running_loop().time()
