"""Restores the answers of a broken stream up to the last token that the client has."""

import asyncio

from services.common.errors import InvalidRequest, TimedOut
from services.frontend.generation.answer import Piece
from services.frontend.generation.answers import Answers
from services.frontend.generation.replay import replay
from services.frontend.generation.running_answers import RunningAnswers
from services.frontend.generation.value_checks import RecordingReader, ValueChecks
from services.frontend.link.scheduler_events import TIMED_OUT
from services.frontend.request.resumption import TOKENS_FIELD, AnswerSoFar, Resumption
from services.frontend.text.message_reader import MessageReader


class RestoredAnswers:
    """Restores the answers of one call, if the call resumes a broken stream, and keeps the restored
    answers. A new stream has none."""

    __slots__ = (
        "_answers",
        "_checks",
        "_readers",
        "_replaying",
        "_resumption",
        "_running",
        "endings",
    )

    def __init__(
        self,
        answers: Answers,
        running: RunningAnswers,
        resumption: Resumption | None,
        *,
        checks: ValueChecks | None,
        replaying: asyncio.Lock,
    ) -> None:
        """`replaying` is a lock that is held while tokens are replayed."""
        self._answers = answers
        self._running = running
        self._resumption = resumption
        self._checks = checks
        self._replaying = replaying
        self._readers: dict[int, MessageReader] = {}
        """Message readers of the restored answers, keyed by the index of the answer."""
        self.endings: list[Piece] = []
        """Last pieces of the answers that had ended before the client received their last piece."""

    def is_new(self, index: int) -> bool:
        """Returns whether the client has received nothing of the answer `index` yet."""
        if self._resumption is None:
            return True
        so_far = self._resumption.answers[index]
        return not so_far.token_ids and not so_far.is_finished

    def take_reader(self, index: int) -> MessageReader | None:
        """Removes and returns the message reader of an answer. This reader has already read the
        text that the client has. Returns None if the answer was not restored."""
        return self._readers.pop(index, None)

    async def restore(self, *, deadline: float | None) -> None:
        """Restores all answers. `deadline` is a time of the event loop's clock; None sets no limit.

        Raises:
            InvalidRequest: the broken stream cannot have sent the tokens that the resumption names.
            TimedOut: the deadline has passed before all answers are restored.
        """
        if self._resumption is None:
            return
        try:
            async with asyncio.timeout_at(deadline):
                for index, so_far in enumerate(self._resumption.answers):
                    await self._restore(index, so_far, self._resumption.request_id)
        except TimeoutError:
            raise TimedOut(TIMED_OUT, may_retry=False) from None

    async def _restore(self, index: int, so_far: AnswerSoFar, request_id: str) -> None:
        answer = self._answers.begin(index)
        prompt = self._answers.prompt(index)
        ending = so_far.ending(
            max_new_tokens=prompt.max_new_tokens, stop_token_ids=prompt.stop_token_ids
        )
        reader = prompt.answer_format.reader(request_id, index)
        self._readers[index] = reader
        if self._checks is not None:
            reader = RecordingReader(reader, self._checks, index)
        async with self._replaying:
            piece = await replay(answer, so_far.token_ids, ending=ending, reader=reader)
        if answer.is_finished:
            piece = self._running.ended(answer, piece)
            if not so_far.is_finished:
                self.endings.append(piece)
        elif so_far.is_finished:
            raise InvalidRequest(TOKENS_FIELD, f"answer {index} does not end with its tokens")
