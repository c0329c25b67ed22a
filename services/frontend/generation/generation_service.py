"""The one implementation behind both protocols.

    wait → check → submit → assemble → cancel

A request is checked and made into tokens here; a `Generation` does the rest. However the client's
call ends, whatever still runs is cancelled on the way out: `open` is the only way to get one.

While there is no pipeline, requests wait for one up to `hold_s` seconds: another scheduler takes
the lead, or the pipeline forms again, and their clients see nothing but a pause. What is served is
told meanwhile as it was last known, since it is the same before and after.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from sys import getsizeof

from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from services.common import errors
from services.frontend.generation.generation import EncodedPrompt, Generation
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.link.scheduler_events import DEFAULT_RETRY_AFTER_S
from services.frontend.observing.metrics import Call, FrontendMetrics
from services.frontend.observing.request_span import RequestSpan, request_span
from services.frontend.request.generation_request import (
    Conversation,
    GenerationRequest,
    Prompt,
    prompt_field,
)
from services.frontend.request.limits import Limits
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.pipeline import Pipeline
from services.frontend.request.resumption import TOKENS_FIELD
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 8192
"""Characters of the longest text that is made into tokens on the event loop, which takes about a
millisecond; longer ones go to a thread."""

TOKEN_BYTES = 40
"""Bytes that a token of a request takes in memory: a number, and its place in a tuple."""


class GenerationService:
    """Answers requests until it is told to stop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheduler: SchedulerClient,
        *,
        chat_template: ChatTemplate | None = None,
        max_in_flight: int = 4096,
        budget: MemoryBudget | None = None,
        hold_s: float = 0.0,
        tracer: Tracer | None = None,
        metrics: FrontendMetrics | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._tracer = tracer or NoOpTracer()
        self._metrics = metrics or FrontendMetrics(CollectorRegistry())
        self._scheduler = scheduler
        self._chat_template = chat_template
        self._max_in_flight = max_in_flight
        self._budget = budget or MemoryBudget(64 * 2**20)
        self._hold_s = hold_s
        self.n_in_flight = 0
        """Answers that are admitted and not yet over."""
        self.n_waiting = 0
        """Answers of these that wait for a pipeline."""
        self._is_leaving = False
        self._is_stopping = False
        self._replaying = asyncio.Lock()  # the tokens of one resumption at a time
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be continued."""
        return self._chat_template is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent here: there is a pipeline, or one is likely to come while
        they are held."""
        return not self._is_leaving and _now() < self._scheduler.hold_deadline(self._hold_s)

    async def wait_readiness(self, is_ready: bool) -> None:
        """Waits until `is_ready` has that value; does not notice `leave`."""
        while self.is_ready is not is_ready:
            deadline = self._scheduler.hold_deadline(self._hold_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline if _now() < deadline < math.inf else None):
                    await self._scheduler.wait_change()

    def describe(self) -> Pipeline:
        """Returns the pipeline that serves, or the last one that did; raises Unavailable before the
        first."""
        return self._scheduler.last_known

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the tokens that a generation would start with.

        Raises:
            InvalidRequest: tokens are not in the vocabulary, or a conversation can't be written
            out.
        """
        limits = Limits(self.describe())
        token_ids = await self._to_tokens(prompt)
        limits.check_tokens(prompt_field(prompt), token_ids)
        return token_ids

    @asynccontextmanager
    async def open(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Opens a generation whose answers are all in the pool; answers that still run at the end
        are cancelled.

        Raises:
            InvalidRequest: the request breaks a rule.
            PoolFull: there is too much at once.
            Unavailable: there is no pipeline in time, or this process is stopping.
        """
        until = _now() + self._hold_s
        model = self._scheduler.last_model
        with (
            self._metrics.call(request, model=model) as call,
            request_span(self._tracer, request, model=model) as span,
        ):
            request.check()
            span.checked(request)
            with self._in_flight(request.n_answers, _n_bytes(request)):
                generation = await self._generation(request, until, span, call)
                try:
                    await generation.start()
                    yield generation
                finally:
                    generation.close()

    def leave(self) -> None:
        """Becomes unready, so that requests are sent elsewhere; those that still come are taken."""
        self._is_leaving = True

    def refuse_new(self) -> None:
        """Takes no more requests; those that run, or are held, go on."""
        self._is_leaving = self._is_stopping = True

    async def wait_idle(self) -> None:
        """Waits until nothing is in flight."""
        await self._idle.wait()

    async def _generation(
        self, request: GenerationRequest, until: float, span: RequestSpan, call: Call
    ) -> Generation:
        was_held = not self._scheduler.is_open
        self.n_waiting += request.n_answers
        try:
            pipeline = await self._scheduler.wait_open(until)
        finally:
            self.n_waiting -= request.n_answers
        return Generation(
            request.options,
            await self._encode(request, Limits(pipeline)),
            self.tokenizer,
            self._scheduler,
            model=pipeline.model,
            until=until,
            replaying=self._replaying,
            was_held=was_held,
            resumption=request.resumption,
            span=span,
            call=call,
        )

    @contextmanager
    def _in_flight(self, n_answers: int, n_bytes: int) -> Iterator[None]:
        if self._is_stopping:
            raise errors.Unavailable("the server is stopping")
        if self.n_in_flight + n_answers > self._max_in_flight:
            raise errors.PoolFull("too many requests", retry_after_s=DEFAULT_RETRY_AFTER_S)
        share = self._budget.share(n_bytes)
        self.n_in_flight += n_answers
        self._idle.clear()
        try:
            yield
        finally:
            share.close()
            self.n_in_flight -= n_answers
            if self.n_in_flight == 0:
                self._idle.set()

    async def _encode(
        self, request: GenerationRequest, limits: Limits
    ) -> tuple[EncodedPrompt, ...]:
        limits.check_model(request.model)
        stop_token_ids = limits.stop_token_ids(request.options)
        if request.resumption is not None:
            for answer in request.resumption.answers:
                limits.check_tokens(TOKENS_FIELD, answer.token_ids)
        encoded = []
        for prompt in request.prompts:
            token_ids = await self._to_tokens(prompt)
            limits.check_prompt(prompt_field(prompt), token_ids)
            max_new_tokens = limits.max_new_tokens(
                request.options,
                n_prompt=len(token_ids),
                is_chat=isinstance(prompt, Conversation),
            )
            encoded.append(EncodedPrompt(prompt, token_ids, max_new_tokens, stop_token_ids))
            await asyncio.sleep(0)  # others come in between
        return tuple(encoded)

    async def _to_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, str):
            return await self._text_to_tokens(prompt, add_special_tokens=True)
        return await self._text_to_tokens(self._render(prompt), add_special_tokens=False)

    async def _text_to_tokens(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.to_tokens(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.tokenizer.to_tokens, text, add_special_tokens=add_special_tokens
        )

    def _render(self, conversation: Conversation) -> str:
        if not conversation.messages:
            raise errors.InvalidRequest("messages", "must not be empty")
        if self._chat_template is None:
            raise errors.InvalidRequest(
                "messages", "the model has no chat template; send a prompt instead"
            )
        return self._chat_template.render(conversation.messages)


def _n_bytes(request: GenerationRequest) -> int:
    """Returns about how many bytes of memory a request takes."""
    n_bytes = getsizeof(request.model)
    for prompt in request.prompts:
        if isinstance(prompt, Conversation):
            for turn in prompt.messages:
                n_bytes += getsizeof(turn.role) + getsizeof(turn.content) + getsizeof(turn.name)
        else:
            is_text = isinstance(prompt, str)
            n_bytes += getsizeof(prompt) if is_text else TOKEN_BYTES * len(prompt)
    if request.resumption is not None:
        n_bytes += TOKEN_BYTES * request.resumption.n_tokens
    return n_bytes


def _now() -> float:
    return asyncio.get_running_loop().time()
