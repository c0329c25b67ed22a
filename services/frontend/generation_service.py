"""The one implementation behind both protocols.

    check → submit → assemble → cancel

A request is checked and made into tokens here; a `Generation` does the rest. However the client's
call ends, whatever still runs is cancelled on the way out: `open` is the only way to get one.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from services.common import errors
from services.frontend.chat_template import ChatTemplate
from services.frontend.generation import EncodedPrompt, Generation
from services.frontend.generation_request import (
    Conversation,
    GenerationRequest,
    Limits,
    Prompt,
    prompt_field,
)
from services.frontend.scheduler_client import SchedulerClient
from services.frontend.scheduler_events import DEFAULT_RETRY_AFTER_S, Pipeline
from services.frontend.tokenizer import Tokenizer

INLINE_CHARACTERS = 8192
"""Longer texts become tokens in a thread: others may wait a millisecond for one text, not more."""


class GenerationService:
    """Answers requests, as long as it is not told to stop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheduler: SchedulerClient,
        *,
        chat_template: ChatTemplate | None = None,
        max_in_flight: int = 4096,
    ) -> None:
        self.tokenizer = tokenizer
        self._scheduler = scheduler
        self._chat_template = chat_template
        self._max_in_flight = max_in_flight
        self._n_in_flight = 0
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be continued."""
        return self._chat_template is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken at all."""
        return self._scheduler.is_connected and not self._is_stopping

    def describe(self) -> Pipeline:
        """What is served; raises Unavailable while nothing is."""
        return self._scheduler.pipeline

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens that a generation would start with.

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
        """A generation whose answers are all in the pool; what still runs at the end is cancelled.

        Raises:
            InvalidRequest: the request breaks a rule.
            PoolFull: there is too much at once.
            Unavailable: there is no pipeline, or this process is stopping.
        """
        request.check()
        n_answers = len(request.prompts) * request.options.n
        with self._in_flight(n_answers):
            prompts = await self._encode(request)
            generation = Generation(request.options, prompts, self.tokenizer, self._scheduler)
            try:
                await generation.start()
                yield generation
            finally:
                generation.close()

    def refuse_new(self) -> None:
        """Takes no more requests; those that run go on."""
        self._is_stopping = True

    async def wait_idle(self) -> None:
        """Waits until nothing is in flight."""
        await self._idle.wait()

    @contextmanager
    def _in_flight(self, n_answers: int) -> Iterator[None]:
        if self._is_stopping:
            raise errors.Unavailable("the server is stopping")
        if self._n_in_flight + n_answers > self._max_in_flight:
            raise errors.PoolFull("too many requests", retry_after_s=DEFAULT_RETRY_AFTER_S)
        self._n_in_flight += n_answers
        self._idle.clear()
        try:
            yield
        finally:
            self._n_in_flight -= n_answers
            if self._n_in_flight == 0:
                self._idle.set()

    async def _encode(self, request: GenerationRequest) -> tuple[EncodedPrompt, ...]:
        limits = Limits(self.describe())
        limits.check_model(request.model)
        stop_token_ids = limits.stop_token_ids(request.options)
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
