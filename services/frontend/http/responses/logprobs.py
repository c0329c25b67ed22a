"""The log-probabilities of the tokens that make the texts of an answer.

A model writes texts, reasoning and calls one after the other, with marks in between. The reader of
messages returns text as soon as its tokens have come. So the text that was returned last ends where
the characters so far end, or a few characters earlier if the reader holds some back. The tokens
between two texts belong to no text.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.protocol.token_logprobs import ChatTokenLogprob, token_logprobs


class TextLogprobs(ABC):
    """Returns the log-probabilities of the tokens of each text of an answer, in order."""

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Takes the next piece of the answer, with its tokens and log-probabilities."""

    @abstractmethod
    def take(self, text: str) -> list[ChatTokenLogprob]:
        """Returns the log-probabilities of the tokens that make `text`, the next text that was read
        from the pieces. Tokens before this text are dropped."""


class NoLogprobs(TextLogprobs):
    """Used if the client does not ask for log-probabilities: every text has none."""

    def add(self, piece: Piece) -> None:
        pass

    def take(self, text: str) -> list[ChatTokenLogprob]:
        return []


class AnswerLogprobs(TextLogprobs):
    """Log-probabilities of the tokens of one answer."""

    def __init__(self, generation: Generation) -> None:
        self._texts = generation.token_texts
        self._n_top = generation.options.n_logprobs or 0
        self._written = ""
        """Characters that the model has written since the end of the last text that `take` was
        given."""
        self._n_before = 0  # characters of `_written` before the last piece
        self._n_taken = 0  # characters before `_written`
        self._tokens: deque[tuple[int, ChatTokenLogprob]] = deque()
        """Tokens after the last text that `take` was given. Each comes with the number of
        characters of the answer before it."""

    def add(self, piece: Piece) -> None:
        self._n_before = len(self._written)
        self._written += piece.text
        scores = piece.scores
        if scores is not None and scores.logprobs is not None:
            listed = token_logprobs(
                self._texts, scores.token_ids, scores.logprobs, n_top=self._n_top
            )
            self._tokens.extend(zip(scores.offsets, listed, strict=True))

    def take(self, text: str) -> list[ChatTokenLogprob]:
        at = self._place_of(text)
        if at < 0:
            return []
        begin, end = self._n_taken + at, self._n_taken + at + len(text)
        found = []
        while self._tokens and self._tokens[0][0] < end:
            token_at, logprob = self._tokens.popleft()
            next_at = self._tokens[0][0] if self._tokens else end
            if token_at >= begin or next_at > begin:
                found.append(logprob)
        self._n_before -= end - self._n_taken
        self._written = self._written[end - self._n_taken :]
        self._n_taken = end
        return found

    def _place_of(self, text: str) -> int:
        """Returns the position at which a text begins in the characters that the model has written.
        Returns -1 if the text does not occur in them."""
        if self._written.endswith(text):
            return len(self._written) - len(text)
        # The reader holds characters of the piece back, or has held back the first of the text.
        at = self._written.find(text, max(0, self._n_before - len(text)))
        return at if at >= 0 else self._written.rfind(text)


def in_tokens(piece: Piece) -> Iterator[Piece]:
    """Yields a piece as pieces of one token each if it has log-probabilities. A piece without
    log-probabilities is yielded unchanged."""
    begin = 0
    for end in () if piece.scores is None else piece.scores.offsets[1:]:
        yield Piece(piece.index, piece.text[begin:end])
        begin = end
    yield Piece(
        piece.index,
        piece.text[begin:],
        finish_reason=piece.finish_reason,
        schema_valid=piece.schema_valid,
    )
