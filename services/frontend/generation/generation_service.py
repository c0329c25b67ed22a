"""The one implementation behind all protocols, for one model.

    wait → check → submit → assemble → cancel

A request is checked here and turned into tokens (`RequestEncoder`); a `Generation` does the rest.
`open` is the only way to get a `Generation`. When the client's call ends, for whatever reason,
`open` cancels the answers that still run.

While there is no pipeline, requests wait for one up to `hold_s` seconds, for example while another
scheduler takes the lead or the pipeline forms again. They wait up to `wake_s` seconds for a model
that is asleep or starts. A client sees only a pause. Meanwhile,
questions about the model are answered with the last known pipeline, since the next pipeline serves
the same model.
"""

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.generation.admission import Admission
from services.frontend.generation.call_resources import CallResources
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.generation.generation import Generation
from services.frontend.generation.model_profile import ModelProfile
from services.frontend.generation.request_encoder import RequestEncoder
from services.frontend.generation.service_limits import ServiceLimits
from services.frontend.link.known_pipeline import ModelState
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.observing.metrics import FrontendMetrics, MeasuredCall
from services.frontend.observing.request_span import RequestSpan, request_span
from services.frontend.request.client_call import current_call
from services.frontend.request.generation_request import (
    GenerationOptions,
    GenerationRequest,
    Prompt,
)
from services.frontend.request.limits import ModelLimits
from services.frontend.request.logprobs import LOGPROB_BYTES
from services.frontend.request.pipeline import ServedPipeline
from services.frontend.text.bad_words import with_bad_words
from services.frontend.text.grammar_check import GrammarCheck
from services.frontend.text.prompt_encoder import PromptEncoder
from services.frontend.text.text_threads import TextThreads
from services.frontend.text.tokenizer import Tokenizer

Result = TypeVar("Result")

DETOKENIZED_FIELD = "tokens"
"""Name of the request field with the tokens that `detokenize` turns into text."""

NAMED_AT_ONCE = 4096
"""Number of tokens whose names are looked up before other tasks may run: a millisecond of work."""

TOKEN_NAME_BYTES = 96
"""Bytes of memory that the name of a token takes, as an object and in JSON."""

SUBMISSION_TOKEN_BYTES = 2 * array("I").itemsize
"""Bytes of memory that a prompt token takes in each submission that the scheduler has at a time:
once in the submission, and once in the copy that is sent."""


class GenerationService:
    """Serves the requests of all protocols to one model, for generated text and for tokens."""

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
        self._anybody = Account()
        self.n_waiting = 0
        """Number of answers that wait for a pipeline."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be answered."""
        return self._profile.chat_template is not None

    @property
    def takes_requests(self) -> bool:
        """Whether new requests are served. They are served if this process does not refuse them,
        and if there is a pipeline or one is likely to form while requests are held."""
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
        pipeline = self._scheduler.pipeline.last
        self._model_limits(pipeline).check_model(model)
        return pipeline

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names by which clients know the model. Answers show the first name. Raises Unavailable if
        the settings give no name and there has been no pipeline."""
        return self._profile.names or (self.describe().model,)

    @property
    def model_state(self) -> ModelState:
        """State of the model: whether a pipeline serves it and, if not, why."""
        return self._scheduler.pipeline.state

    @property
    def model_created(self) -> int:
        """Time at which the model's files were written, in seconds since 1970."""
        return self._profile.created

    def check_room(self, account: Account) -> None:
        """Checks that there is room for a new call, and that a request of the account's best
        priority would not wait too long. This must be called before any other work is done for the
        call. Calls that resume a broken stream need no check.

        Raises:
            PoolFull: there is no room for a new call at the moment.
            Unavailable: this process is stopping.
        """
        self._admission.check_room()
        self._scheduler.check_room()
        self._scheduler.check_time(account.name, account.min_priority)

    async def tokenize(
        self,
        prompt: Prompt,
        account: Account | None = None,
        *,
        model: str = "",
        options: GenerationOptions | None = None,
    ) -> Sequence[int]:
        """Returns the tokens that the prompt becomes when text is generated with these options. The
        call counts as a call with one answer.

        Raises:
            InvalidRequest: the prompt is too long, tokens are not in the vocabulary, a conversation
            can't be rendered, or an option or the time limit of the call is wrong.
            UnknownModel: `model` is not the model that is served.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over.
        """
        deadline = self._deadline()
        options = options or GenerationOptions()
        options.check()
        request = GenerationRequest(prompts=(prompt,), options=replace(options, n=1))
        request.check()
        self._prompt_encoder.check_length(request.prompts, self._last_limits())
        with self._admission.admitted(request, account or self._anybody) as resources:
            limits = self._model_limits(self.describe())
            limits.check_model(model)
            limits.stop_token_ids(options)
            encoding = self._prompt_encoder.to_tokens(
                prompt, limits, resources.share, add_special_tokens=options.add_special_tokens
            )
            return await _until(deadline, encoding)

    async def count(
        self, prompt: Prompt, account: Account | None = None, *, model: str = ""
    ) -> int:
        """Returns the number of tokens of a prompt, also of a prompt that is too long for the
        model. The call counts as a call with one answer.

        Raises:
            InvalidRequest: the prompt has too many characters, a conversation can't be rendered, or
            the time limit of the call is wrong.
            UnknownModel: `model` is not the model that is served.
            PoolFull: there is no room for the call at the moment.
            TimedOut: the time limit of the call is over.
        """
        deadline = self._deadline()
        request = GenerationRequest(prompts=(prompt,))
        request.check()
        with self._admission.admitted(request, account or self._anybody) as resources:
            limits = self._model_limits(self.describe())
            limits.check_model(model)
            return await _until(
                deadline, self._prompt_encoder.count(prompt, limits, resources.share)
            )

    async def detokenize(
        self, token_ids: tuple[int, ...], account: Account | None = None, *, model: str = ""
    ) -> str:
        """Returns the text of tokens, including special tokens. The call counts as a call with one
        answer.

        Raises:
            InvalidRequest: there are more tokens than the model can read, a token is not in the
            vocabulary, or the time limit of the call is wrong.
            UnknownModel: `model` is not the model that is served.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over.
        """
        deadline = self._deadline()
        limits = self._model_limits(self.describe())
        limits.check_model(model)
        limits.check_text(DETOKENIZED_FIELD, token_ids)
        with self._admission.admitted(
            GenerationRequest(prompts=("",)), account or self._anybody
        ) as resources:
            return await _until(deadline, self._prompt_encoder.to_text(token_ids, resources.share))

    async def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the names that tokens have in the vocabulary. Raises PoolFull if the memory
        budget has no room for them."""
        names: list[str] = []
        with self._admission.budget.share(TOKEN_NAME_BYTES * len(token_ids)):
            for start in range(0, len(token_ids), NAMED_AT_ONCE):
                names += self.tokenizer.names_of(token_ids[start : start + NAMED_AT_ONCE])
                await asyncio.sleep(0)  # lets other work run
        return names

    @asynccontextmanager
    async def open(
        self, request: GenerationRequest, account: Account | None = None
    ) -> AsyncIterator[Generation]:
        """Prepares a generation as `prepare` does, and yields it when the scheduler has accepted
        its first answers.

        Raises:
            InvalidRequest: the request breaks a rule.
            PoolFull: there is no room for the call at the moment.
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
        run. The generation counts against the limits of the account until the scheduler has ended
        it. Its id and its time limit come from the call that this task serves (`current_call`).

        Raises:
            InvalidRequest: the request breaks a rule.
            PoolFull: there is too much at once.
            TimedOut: the time of the call is over; later, the generation raises it.
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
            deadline = self._deadline()
            span.checked(request)
            account = account or self._anybody
            if request.resumption is None:
                self._scheduler.check_time(account.name, request.options.priority)
            self._prompt_encoder.check_length(request.prompts, self._last_limits())
            with self._admission.admitted(request, account) as resources:
                generation = await _until(
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

    def _deadline(self) -> float | None:
        """Returns the time at which the call of this task must have ended, by the event loop's
        clock. Returns None if there is no limit."""
        call = current_call()
        wanted = None if call is None else call.deadline()
        if not self._limits.max_request_s:
            return wanted
        began_at = _now() if call is None else call.began_at
        return min(wanted or math.inf, began_at + self._limits.max_request_s)

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
        limits = self._model_limits(pipeline)
        request = with_bad_words(request, self.tokenizer)
        prompts = await self._request_encoder.encode(request, limits, resources.share)
        resources.share.grow(self._n_bytes(prompts, request.options))
        client_call = current_call()
        return Generation(
            request.options,
            prompts,
            self.tokenizer,
            self._scheduler,
            model=pipeline.model,
            shown_model=limits.names[0],
            until=until,
            resources=resources,
            request_id=None if client_call is None else client_call.request_id,
            was_held=was_held,
            resumption=request.resumption,
            span=span,
            call=call,
            check_value=partial(
                self._request_encoder.check_value, limits=limits, share=resources.share
            ),
        )

    def _last_limits(self) -> ModelLimits | None:
        """Returns the limits of the model of the current or last pipeline. Returns None if there
        has been no pipeline."""
        return self._model_limits(self.describe()) if self._scheduler.pipeline.last_model else None

    def _model_limits(self, pipeline: ServedPipeline) -> ModelLimits:
        return ModelLimits(
            pipeline, self._profile.names, strict_max_tokens=self._limits.strict_max_tokens
        )

    def _n_bytes(self, prompts: Sequence[EncodedPrompt], options: GenerationOptions) -> int:
        """Returns the approximate memory, in bytes, that a request takes in addition when its
        prompts have become tokens. The memory of the request itself was counted when the request
        arrived."""
        n_at_once = self._admission.max_answers_at_once
        n_answers = len(prompts) * options.n_generated
        n_grammar_bytes = sum([len(prompt.answer_format.grammar) for prompt in prompts])
        return (
            self._n_token_bytes(prompts, options.n_generated)
            + _n_prompt_logprob_bytes(prompts, options)
            + options.n_bytes * min(n_answers, n_at_once)
            + n_grammar_bytes * (1 + min(options.n_generated, n_at_once))
        )

    def _n_token_bytes(self, prompts: Sequence[EncodedPrompt], n: int) -> int:
        """Returns the approximate memory, in bytes, of the tokens of `prompts` and of the copies of
        the tokens for the scheduler. If the client sent a prompt as tokens, only the copies are
        counted, since the tokens were counted when the request arrived. It is assumed that the
        copies of the longest prompts exist at the same time."""
        n_packed = sum(
            len(prompt.token_ids) for prompt in prompts if not isinstance(prompt.prompt, tuple)
        )
        lengths = sorted((len(prompt.token_ids) for prompt in prompts), reverse=True)
        n_copied, n_left = 0, self._admission.max_answers_at_once
        for length in lengths:
            n_copied += length * min(n, n_left)
            n_left -= min(n, n_left)
        return array("I").itemsize * n_packed + SUBMISSION_TOKEN_BYTES * n_copied


def _n_prompt_logprob_bytes(prompts: Sequence[EncodedPrompt], options: GenerationOptions) -> int:
    """Returns the approximate memory, in bytes, of the log-probabilities of prompts that the
    answers will bring."""
    if options.n_prompt_logprobs is None:
        return 0
    n_numbers = (1 + options.n_prompt_logprobs) * options.n_generated
    return LOGPROB_BYTES * n_numbers * sum(len(prompt.token_ids) for prompt in prompts)


async def _until(deadline: float | None, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. Raises TimedOut if `work` has not ended by the deadline, or if
    the deadline is past."""
    if deadline is None:
        return await work
    # With a past deadline, `timeout_at` would cancel the work only where the work first waits.
    if _now() < deadline:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                return await work
    work.close()
    raise errors.TimedOut("the request waited longer than it may take", may_retry=False)


def _now() -> float:
    return asyncio.get_running_loop().time()
