"""One client call while it runs.

Each answer is submitted to the scheduler on its own (`Submissions`), a few at a time, so that one
call cannot fill the pool. The events of all answers arrive in one inbox and leave it as pieces of
text (`RunningAnswers`). `close` cancels the answers that still run. When a pipeline or a scheduler
is lost, the scheduler client (`SchedulerClient`) continues each answer with the next pipeline or
scheduler.

A call that resumes a broken stream first restores every answer (`RestoredAnswers`). Answers that
had not ended are submitted with the tokens that the client has already.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from orcinus.v1 import scheduler_pb2

from services.common.errors import TimedOut
from services.common.pooling import Pooling
from services.frontend.generation.answer import Answer, Piece
from services.frontend.generation.answers import Answers
from services.frontend.generation.call_resources import CallResources
from services.frontend.generation.encoded_call import EncodedCall
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.generation.inbox import Inbox
from services.frontend.generation.outlet import Outlet
from services.frontend.generation.receipts import MakeReceipts
from services.frontend.generation.restored_answers import RestoredAnswers
from services.frontend.generation.running_answers import RunningAnswers
from services.frontend.generation.submissions import Submissions
from services.frontend.generation.value_checks import CheckValue, checks_of
from services.frontend.generation.whole_answers import WholeAnswers
from services.frontend.link.scheduler_client import SchedulerClient
from services.frontend.link.scheduler_events import (
    TIMED_OUT,
    Accepted,
    Built,
    Completed,
    Event,
    OutputTokens,
    PromptLogprobs,
    Vector,
)
from services.frontend.observing.metrics import MeasuredCall
from services.frontend.observing.request_span import UNRECORDED, RequestSpan
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.message_reader import MessageReader
from services.frontend.text.token_texts import TokenTexts


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Numbers of tokens in the prompts and in the answers of one call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were found in a cache."""


class Generation:
    """Runs one client call, and yields the pieces of its answers: `n` answers to each prompt.

    If the call resumes a broken stream, only the pieces that the client lacks are yielded.
    """

    __slots__ = (
        "__weakref__",
        "_answers",
        "_at_scheduler",
        "_call",
        "_checks",
        "_expiry",
        "_inbox",
        "_outlet",
        "_receipts",
        "_resources",
        "_restored",
        "_running",
        "_shows_text_only",
        "_span",
        "_submissions",
        "options",
        "prompts",
    )

    def __init__(
        self,
        call: EncodedCall,
        scheduler: SchedulerClient,
        *,
        resources: CallResources,
        span: RequestSpan = UNRECORDED,
        measured: MeasuredCall | None = None,
        check_value: CheckValue | None = None,
        make_receipts: MakeReceipts | None = None,
    ) -> None:
        """`make_receipts` makes the object that issues the receipts of the answers. If it is None,
        answers have no receipts."""
        measured = measured or MeasuredCall(call.n_answers)
        measured.n_prompt_tokens = call.n_prompt_tokens
        self._call = call
        self.options = call.options
        self.prompts = call.prompts
        self._resources = resources
        self._span = span
        self._answers = Answers(call, account=resources.account, trace=span.message)
        self._receipts = make_receipts and make_receipts(
            self._answers, call.request_id, resources.keep
        )
        self._checks = checks_of(
            check_value,
            call.prompts,
            call.options.format_schema,
            keep=resources.keep,
            note=measured.checked_values.append,
        )
        self._inbox = Inbox(resources.budget, refusals=resources.refusals)
        self._outlet: Outlet | None = None
        self._shows_text_only = not call.options.shows_tokens
        self._submissions = Submissions(
            scheduler,
            self,
            model=call.model,
            resources=resources,
            was_held=call.was_held,
            span=span,
        )
        self._at_scheduler = self._submissions.at_scheduler
        self._expiry: asyncio.TimerHandle | None = None
        self._running = RunningAnswers(
            self._answers,
            span=span,
            call=measured,
            cut_off=self._submissions.cut_off,
            receipts=None if call.options.is_ranked else self._receipts,
        )
        self._restored = RestoredAnswers(
            self._answers,
            self._running,
            call.resumption,
            checks=self._checks,
            replaying=resources.replaying,
        )

    @property
    def request_id(self) -> str:
        """Id of the call, or of the broken stream that the call resumes."""
        return self._call.request_id

    @property
    def model(self) -> str:
        """Name of the model that is shown to clients."""
        return self._call.shown_model

    @property
    def pooling(self) -> Pooling | None:
        """How the model makes vectors (embeddings or scores); None if it makes none."""
        return self._call.pooling

    @property
    def is_resumed(self) -> bool:
        """Whether this call resumes a broken stream. The client then has a part of the answers
        already."""
        return self._call.resumption is not None

    @property
    def n_answers(self) -> int:
        """Number of answers to all prompts together."""
        return self._answers.n_answers

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Names of the JSON-schema keywords that the grammar does not enforce."""
        return () if self._checks is None else self._checks.unenforced

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of fields of the request whose values the chat template leaves out."""
        return tuple(dict.fromkeys(name for prompt in self.prompts for name in prompt.left_out))

    @property
    def usage(self) -> TokenUsage:
        """Numbers of tokens in the prompts and in the answers so far."""
        return TokenUsage(
            self._call.n_prompt_tokens,
            self._answers.n_tokens,
            self._running.n_cached_tokens,
        )

    @property
    def token_texts(self) -> TokenTexts:
        """Texts of single tokens of the model's tokenizer."""
        return self._call.tokenizer.token_texts

    def prompt_of(self, index: int) -> EncodedPrompt:
        """Returns the prompt of an answer. `index` counts the answers that the client gets: `n` for
        each prompt."""
        return self.prompts[index // self.options.n]

    def n_shown(self, piece: Piece) -> int:
        """Returns how many of the tokens that have log-probabilities in a piece belong to the text
        of the answer. A stop token that ends the answer belongs to the text only if the client asks
        for it."""
        token_ids = () if piece.scores is None else piece.scores.token_ids
        if self.options.include_stop_str_in_output or not token_ids:
            return len(token_ids)
        stops = self.prompt_of(piece.index).stop_token_ids
        return len(token_ids) - (token_ids[-1] in stops)

    def prompt_text_offsets(self, index: int) -> Sequence[int]:
        """Returns, for each token of an answer's prompt, the position in the prompt's text at which
        the token begins."""
        are_added = self.options.add_special_tokens is not False
        return self.prompt_of(index).text_offsets(self._call.tokenizer, are_added=are_added)

    def prompt_text(self, index: int) -> str:
        """Returns the text of an answer's prompt."""
        return self.prompt_of(index).text(self._call.tokenizer)

    def is_new(self, index: int) -> bool:
        """Returns whether the client has received nothing of the answer `index` yet."""
        return self._restored.is_new(index)

    def message_reader(self, index: int) -> MessageReader:
        """Returns a reader for the text of an answer to a conversation. If the call resumes a
        broken stream, the reader has already read the text that the client received before. Call
        this method only once for each answer."""
        reader = self._restored.take_reader(index)
        if reader is not None:
            return reader
        return self.prompt_of(index).answer_format.reader(self.request_id, index)

    def end_at(self, deadline: float) -> None:
        """Makes the call end with TimedOut at `deadline`, a time of the event loop's clock, unless
        the call is closed before."""
        self._submissions.deadline = deadline
        self._expiry = asyncio.get_running_loop().call_at(deadline, self._expire)

    def stop_met(self, index: int) -> str:
        """Returns the stop string that ended an answer. The result is empty if none did."""
        return self._answers.begun[self._answers.name(index)].stop_met

    def keep(self, n_bytes: int) -> None:
        """Takes `n_bytes` of the memory budget for output that is kept. A negative number gives
        bytes back. Has no effect after the end of the call. Raises PoolFull if the budget has too
        little memory left."""
        self._resources.keep(n_bytes)

    async def start(self) -> None:
        """Submits the first few answers and waits until the scheduler has accepted them. If the
        call resumes a broken stream, answers that had ended are not submitted.

        Raises:
            InvalidRequest: the scheduler refuses an answer, or the broken stream cannot have sent
            the tokens that the resumption names.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over.
            Unavailable: an answer could not be submitted in time.
        """
        self._span.submitted(
            self.request_id, model=self._call.model, n_prompt_tokens=self._call.n_prompt_tokens
        )
        await self._restored.restore(deadline=None if self._expiry is None else self._expiry.when())
        if self._inbox.error is not None:
            raise self._inbox.error
        missing = [index for index in range(self.n_answers) if not self._answers.has_ended(index)]
        self._running.begin(missing)
        self._resources.in_flight.end(self.n_answers - len(missing))
        await self._submissions.start(missing, until=self._call.until)

    async def pieces(self, outlet: Outlet | None = None) -> AsyncIterator[Piece]:
        """Yields the pieces of all answers as they come. Empty pieces are left out.

        If `outlet` is given and ready, pieces may be sent through it instead of being yielded,
        while the caller of this iterator waits for the next piece. Pieces with log-probabilities
        are always yielded.

        Raises:
            Unavailable: no pipeline continued the answers in time.
            RequestFailed: the scheduler could not complete an answer.
            PoolFull: too many tokens of the answers were not read.
            TimedOut: the time limit of the call is over.
        """
        for piece in self._restored.endings:
            yield await self._checked(piece)
        if self.options.n_ranked is None and self.options.n_prompt_logprobs is None:
            self._outlet = outlet if self._checks is None else None
        running = self._running.names
        while running:
            event = await self._inbox.get()
            if event.request_id not in running:
                continue
            piece = self._running.apply(event, self._answers.begun[event.request_id])
            if self._is_shown(piece):
                yield piece if self._checks is None else await self._checked(piece)

    async def complete(self) -> list[Piece]:
        """Returns the finished answers in order, each as one piece. With `best_of`, only the best
        answers are returned (`WholeAnswers.best`).

        Raises:
            PoolFull: the answers take more memory than is left.
            OrcinusError: whatever `pieces` raises.
        """
        answers = WholeAnswers(self.options, self._resources.share, n_answers=self.n_answers)
        async for piece in self.pieces():
            answers.add(piece)
        return answers.best(self._with_receipt)

    def put(self, event: Event, answer: Answer) -> None:
        """Called with each event of an answer as soon as the event arrives, even if no task waits
        for pieces."""
        if isinstance(event, OutputTokens):
            outlet = self._outlet
            if outlet is not None and self._inbox.is_awaited and outlet.is_ready:
                self._send_at_once(event, answer, outlet)
                return
        elif event.request_id not in self._at_scheduler:
            return
        elif isinstance(event, Built):
            if self._receipts is not None:
                self._receipts.note_traits(answer.index, event.traits)
            return
        elif not isinstance(event, PromptLogprobs | Vector):
            self._submissions.note_arrival(event)
        if not isinstance(event, Accepted):
            self._inbox.put_nowait(event)
            if self._inbox.error is not None:
                self._give_up(self._inbox.error)

    def submission(self, index: int) -> scheduler_pb2.Submission:
        """Returns the message by which an answer is submitted."""
        return self._answers.submission(index)

    def inbox(self, index: int) -> "AnswerInbox":
        """Returns the inbox for the events of a submitted answer."""
        return AnswerInbox(self, self._answers.begun[self._answers.name(index)])

    def close(self) -> None:
        """Cancels the answers that still run. A second call has no effect."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._submissions.close()
        self._running.names.clear()
        self._inbox.close()
        self._span.closed(self._answers.n_tokens)

    def _send_at_once(self, event: OutputTokens, answer: Answer, outlet: Outlet) -> None:
        """Sends the text of new tokens through the outlet, instead of waking the task that reads
        the pieces."""
        try:
            if answer.is_plain and answer.has_news and self._shows_text_only:
                if text := answer.add_plain(event.token_ids):
                    outlet.take_text(answer.index, text)
                return
            piece = self._running.apply(event, answer)
            if piece.text or self._is_shown(piece):
                outlet.take(piece)
        except Exception as error:  # noqa: BLE001 - raised by the reader: here, it would end the link
            self._inbox.fail(error)
        if answer.is_finished:  # the reader may have nothing more to wait for
            self._inbox.put_nowait(Completed(event.request_id, FinishReason.STOP))

    def _with_receipt(self, whole: Piece) -> Piece:
        """Returns the complete answer `whole` with its receipt, or as it is if it gets no
        receipt."""
        if self._receipts is None:
            return whole
        return self._receipts.with_receipt(
            self._answers.begun[self._answers.name(whole.index)], whole
        )

    async def _checked(self, piece: Piece) -> Piece:
        """Returns `piece`. If it is the last piece of an answer whose values are checked against
        JSON schemas, the returned piece also says whether they match."""
        if self._checks is None:
            return piece
        return await self._checks.checked(piece, self._answers.prompt(piece.index))

    def _expire(self) -> None:
        error = TimedOut(TIMED_OUT, may_retry=False)
        self._inbox.fail(error)
        self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._submissions.fail_start(error)
        self._submissions.withdraw()

    def _is_shown(self, piece: Piece) -> bool:
        if piece.text or piece.finish_reason or piece.vector is not None:
            return True
        if piece.prompt_logprobs is not None:
            return True
        return bool(piece.token_ids) and self.options.shows_tokens


class AnswerInbox:
    """Receives the events of one answer of a call."""

    __slots__ = ("_answer", "_generation")

    def __init__(self, generation: Generation, answer: Answer) -> None:
        self._generation = generation
        self._answer = answer

    def put_nowait(self, event: Event, /) -> None:
        """Passes an event of the answer to the generation, which queues it or sends it to the
        client at once."""
        self._generation.put(event, self._answer)
