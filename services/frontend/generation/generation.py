"""One client call while it runs.

It is submitted once per answer. The events of all its answers come into one inbox and leave it as
pieces of text; `close` cancels whatever still runs. Where a pipeline or a scheduler is lost, the
scheduler client sees to it that each answer goes on.

A call that goes on where a stream broke reads the tokens that its client has once more and throws
their text away. Then every answer is as it was: with the text it held back, the stop strings it had
begun, and its end, if it had come to it. Those that had not are submitted with their tokens.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from orcinus.v1 import scheduler_pb2

from services.common.errors import InvalidRequest
from services.common.sampling import INT64_MIN, SamplingParams
from services.common.sampling_proto import to_proto
from services.frontend.generation.answer import Answer, Piece
from services.frontend.link.scheduler_client import Inbox, SchedulerClient
from services.frontend.link.scheduler_events import Accepted, Event, Failed, Finished, Tokens
from services.frontend.observing.metrics import Call
from services.frontend.observing.request_span import UNRECORDED, RequestSpan
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import Conversation, GenerationOptions, Prompt
from services.frontend.request.request_id import new_request_id
from services.frontend.request.resumption import TOKENS_FIELD, AnswerSoFar, Resumption
from services.frontend.text.stop_strings import StopStrings
from services.frontend.text.tokenizer import IncrementalText, Tokenizer

REPLAYED_TOKENS, REPLAY_S = 64, 0.001
"""Tokens that are read again at a time, and seconds, if stop strings make them take longer; others
come in between."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written by one call."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in tokens, and the limits of an answer to it."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens that the answer's text continues; none for a conversation, whose next turn stands
        alone."""
        return () if isinstance(self.prompt, Conversation) else self.token_ids


class Generation:
    """One client call while it runs: `n` answers to each of its prompts.

    Answers may be held until `until`, a point in time of the event loop's clock, unless a scheduler
    has taken them.
    With a resumption, the pieces are those that its client lacks.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompts: tuple[EncodedPrompt, ...],
        tokenizer: Tokenizer,
        scheduler: SchedulerClient,
        *,
        model: str,
        until: float,
        replaying: asyncio.Lock,
        was_held: bool = False,
        resumption: Resumption | None = None,
        span: RequestSpan = UNRECORDED,
        call: Call | None = None,
    ) -> None:
        self.request_id = new_request_id() if resumption is None else resumption.request_id
        self.model = model
        self.options = options
        self.prompts = prompts
        self._submission_id = self.request_id
        if resumption is not None:
            # The stream that broke, or another that resumes it, may still run here.
            self._submission_id += f"-{secrets.token_hex(8)}"
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._until = until
        self._replaying = replaying
        self._was_held = was_held
        self._resumption = resumption
        self._span = span
        self._trace = span.message
        self._call = call or Call(self.n_answers)
        self._inbox: Inbox = asyncio.Queue()
        self._early: deque[Event] = deque()
        self._endings: list[Piece] = []
        self._answers: dict[str, Answer] = {}
        self._running: set[str] = set()
        self._call.n_prompt_tokens = self.usage.prompt_tokens

    @property
    def n_answers(self) -> int:
        """The number of answers over all prompts."""
        return len(self.prompts) * self.options.n

    @property
    def is_resumed(self) -> bool:
        """Whether the client has a part of the answers already."""
        return self._resumption is not None

    @property
    def usage(self) -> Usage:
        """Tokens read and written so far."""
        return Usage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(answer.n_tokens for answer in self._answers.values()),
        )

    def prompt_of(self, index: int) -> EncodedPrompt:
        """Returns the prompt that an answer belongs to."""
        return self.prompts[index // self.options.n]

    def prompt_text(self, index: int) -> str:
        """Returns the text of an answer's prompt."""
        prompt = self.prompt_of(index)
        if isinstance(prompt.prompt, str):
            return prompt.prompt
        return self._tokenizer.to_text(prompt.token_ids)

    async def start(self) -> None:
        """Submits all answers that have not ended and waits until they are in the pool.

        Raises:
            InvalidRequest: the scheduler refuses an answer, or a client cannot have what it says
            that it has.
            PoolFull: there is too much at once.
            Unavailable: an answer could not be submitted in time.
        """
        self._span.submitted(
            self.request_id, model=self.model, n_prompt_tokens=self.usage.prompt_tokens
        )
        for index in range(self.n_answers):
            await self._begin(index)
        for request_id, answer in self._answers.items():
            if not answer.is_finished:
                self._submit(request_id, answer.index)
        waiting = set(self._running)
        while waiting:
            event = await self._inbox.get()
            if isinstance(event, Failed) and event.request_id in waiting:
                raise event.error
            waiting.discard(event.request_id)
            self._early.append(event)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields the pieces of all answers as they come; empty pieces are left out.

        Raises:
            Unavailable: no pipeline went on with the answers in time.
            RequestFailed: an answer was given up.
        """
        for piece in self._endings:
            yield piece
        while self._running:
            event = self._early.popleft() if self._early else await self._inbox.get()
            if event.request_id not in self._running:
                continue
            piece = self._apply(event)
            if piece.text or piece.finish_reason or self._shows_tokens(piece):
                yield piece

    async def complete(self) -> list[Piece]:
        """Returns the finished answers, each as one piece, in order; raises as `pieces` does."""
        pieces: list[list[Piece]] = [[] for _ in self._answers]
        async for piece in self.pieces():
            pieces[piece.index].append(piece)
        return [Piece.joined(of_one) for of_one in pieces]

    def close(self) -> None:
        """Cancels the answers that still run; does nothing the second time."""
        for request_id in self._running:
            self._scheduler.cancel(request_id)
        self._running.clear()
        self._span.closed(self.usage.completion_tokens)

    async def _begin(self, index: int) -> None:
        """Makes an answer, as far as the client has it."""
        answer = self._answer(index, self.prompt_of(index))
        self._answers[f"{self._submission_id}-{index}"] = answer
        if self._resumption is None:
            return
        so_far = self._resumption.answers[index]
        piece = await self._replay(answer, so_far)
        if answer.is_finished:
            self._note_end(piece, answer)
            if not so_far.is_finished:
                self._endings.append(piece)
        elif so_far.is_finished:
            raise InvalidRequest(TOKENS_FIELD, f"answer {index} does not end with its tokens")

    async def _replay(self, answer: Answer, so_far: AnswerSoFar) -> Piece:
        """Brings an answer to where the client has it; returns its last piece if that is next, or
        an empty one."""
        prompt = self.prompt_of(answer.index)
        ending = so_far.ending(
            max_new_tokens=prompt.max_new_tokens, stop_token_ids=prompt.stop_token_ids
        )
        n_tokens = len(so_far.token_ids)
        async with self._replaying:
            pause_at = time.perf_counter() + REPLAY_S
            for number, token_id in enumerate(so_far.token_ids, start=1):
                answer.add((token_id,))
                if answer.is_finished:
                    break
                if number % REPLAYED_TOKENS == 0 or time.perf_counter() > pause_at:
                    await asyncio.sleep(0)
                    pause_at = time.perf_counter() + REPLAY_S
        if answer.n_tokens < n_tokens:
            raise InvalidRequest(TOKENS_FIELD, "has tokens after those of a stop string")
        if answer.is_finished:
            return Piece(answer.index, finish_reason=FinishReason.STOP)
        return Piece(answer.index) if ending is None else answer.finish(ending)

    def _submit(self, request_id: str, index: int) -> None:
        prompt = self.prompt_of(index)
        self._scheduler.submit(
            scheduler_pb2.Submission(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                max_new_tokens=prompt.max_new_tokens,
                sampling=to_proto(self._sampling(index, prompt)),
                trace=self._trace,
                generated_token_ids=self._tokens_so_far(index),
            ),
            self._inbox,
            model=self.model,
            until=self._until,
            was_held=self._was_held,
            span=self._span,
        )
        self._running.add(request_id)

    def _tokens_so_far(self, index: int) -> tuple[int, ...]:
        return () if self._resumption is None else self._resumption.answers[index].token_ids

    def _answer(self, index: int, prompt: EncodedPrompt) -> Answer:
        return Answer(
            index,
            IncrementalText(self._tokenizer, prompt.context),
            stops=StopStrings(self.options.stop),
            stop_token_ids=frozenset(prompt.stop_token_ids),
            min_tokens=self.options.sampling.min_tokens,
        )

    def _sampling(self, index: int, prompt: EncodedPrompt) -> SamplingParams:
        """Returns the options of an answer: each, to whichever prompt, has a seed of its own."""
        params = self.options.sampling
        seed = (params.seed + index - INT64_MIN) % 2**64 + INT64_MIN  # wraps around
        return replace(params, seed=seed, stop_token_ids=prompt.stop_token_ids)

    def _apply(self, event: Event) -> Piece:
        answer = self._answers[event.request_id]
        match event:
            case Tokens():
                self._span.first_token()
                self._call.took_tokens(answer.index)
                piece = answer.add(event.token_ids)
                if answer.is_finished:
                    self._scheduler.cancel(event.request_id)
            case Finished():
                piece = answer.finish(event.reason)
            case Failed():
                raise event.error
            case Accepted():
                piece = Piece(answer.index)
        if answer.is_finished:
            self._running.discard(event.request_id)
        self._note_end(piece, answer)
        return piece

    def _note_end(self, piece: Piece, answer: Answer) -> None:
        if piece.finish_reason is not None:
            self._span.finished(piece.index, piece.finish_reason)
            self._call.finished(
                piece.index,
                piece.finish_reason,
                n_tokens=answer.n_tokens,
                n_resumed=len(self._tokens_so_far(piece.index)),
            )

    def _shows_tokens(self, piece: Piece) -> bool:
        return self.options.return_token_ids and bool(piece.token_ids)
