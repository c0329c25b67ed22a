"""Applies the scheduler's events to the answers of one call while they run, and reports the first
token and the end of each answer to the metrics and to the span of the call."""

from collections.abc import Callable, Iterable

from services.frontend.generation.answer import Answer, Piece
from services.frontend.generation.answers import Answers
from services.frontend.generation.receipts import CallReceipts
from services.frontend.link.scheduler_events import (
    Completed,
    Event,
    Failed,
    OutputTokens,
    PromptLogprobs,
    Vector,
)
from services.frontend.observing.metrics import MeasuredCall
from services.frontend.observing.request_span import RequestSpan
from services.frontend.request.finish_reason import FinishReason


class RunningAnswers:
    """Applies the scheduler's events to the answers of one call that have not ended yet."""

    __slots__ = ("_answers", "_call", "_cut_off", "_n_cached", "_receipts", "_span", "names")

    def __init__(
        self,
        answers: Answers,
        *,
        span: RequestSpan,
        call: MeasuredCall,
        cut_off: Callable[[str], None],
        receipts: CallReceipts | None = None,
    ) -> None:
        """`cut_off` is called with the name of an answer that this process has ended, for example
        at a stop string. It must make the scheduler cancel the answer. `receipts` makes the receipt
        of each answer when it ends."""
        self._receipts = receipts
        self._answers = answers
        self._span = span
        self._call = call
        self._cut_off = cut_off
        self.names: set[str] = set()
        """Names of the answers that run."""
        self._n_cached: dict[int, int] = {}
        """Number of tokens of each prompt that were in a cache, keyed by the index of the prompt.
        If this number differs between answers to a prompt, the smallest is kept."""

    @property
    def n_cached_tokens(self) -> int:
        """Number of prompt tokens, over all prompts, whose keys and values were found in a
        cache."""
        return sum(self._n_cached.values())

    def begin(self, indices: Iterable[int]) -> None:
        """Adds the answers with these indices, which are about to be submitted, to the running
        answers."""
        self.names.update(map(self._answers.name, indices))

    def apply(self, event: Event, answer: Answer) -> Piece:
        """Applies an event to its answer, and returns the piece of the answer that results. Raises
        the error with which the scheduler ended the answer."""
        piece = self._applied(event, answer)
        if answer.is_finished:
            self.names.discard(event.request_id)
            return self.ended(answer, piece)
        return piece

    def ended(self, answer: Answer, last: Piece) -> Piece:
        """Reports that an answer has ended with the piece `last`. Returns that piece, with the
        receipt of the answer if receipts are made when answers end."""
        reason = last.finish_reason or FinishReason.STOP
        self._span.finished(answer.index, reason)
        self._call.finished(
            answer.index,
            reason,
            n_tokens=answer.n_tokens,
            n_resumed=len(self._answers.tokens_so_far(answer.index)),
        )
        return last if self._receipts is None else self._receipts.with_receipt(answer, last)

    def _applied(self, event: Event, answer: Answer) -> Piece:
        match event:
            case OutputTokens():
                return self._take_tokens(event, answer)
            case Completed():
                return answer.finish(event.reason)
            case Failed():
                raise event.error
            case Vector():
                self._span.first_token()
                self._n_cached[self._answers.prompt_index(answer.index)] = event.n_cached
                return Piece(answer.index, vector=event.values)
            case PromptLogprobs():
                answer.take_prompt_logprobs(event.logprobs)
        return Piece(answer.index)

    def _take_tokens(self, event: OutputTokens, answer: Answer) -> Piece:
        if not answer.has_news:
            answer.has_news = True
            self._note_first(event, answer.index)
            if not self._answers.prompt(answer.index).max_new_tokens:
                self._cut_off(event.request_id)
                return answer.finish(FinishReason.LENGTH)
        piece = answer.add(event.token_ids, event.logprobs)
        if answer.is_finished:
            self._cut_off(event.request_id)
        return piece

    def _note_first(self, event: OutputTokens, index: int) -> None:
        self._span.first_token()
        self._call.took_tokens(index)
        if not event.start:
            prompt = self._answers.prompt_index(index)
            n_cached = self._n_cached.get(prompt, event.n_cached)
            self._n_cached[prompt] = min(n_cached, event.n_cached)
