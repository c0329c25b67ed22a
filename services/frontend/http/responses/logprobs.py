"""The log-probabilities of the tokens that make the texts of an answer.

A model writes texts, reasoning and calls one after the other, with marks in between. The reader of
messages returns the texts without saying which tokens they came from. Each text is therefore looked
for in the characters that the tokens stand for; the tokens in between belong to no text.
"""

from abc import ABC, abstractmethod
from collections import deque

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.protocol.token_logprobs import ChatTokenLogprob, token_logprobs


class TextLogprobs(ABC):
    """Returns the log-probabilities of the tokens of each text of an answer, in order."""

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Takes the next piece of the answer."""

    @abstractmethod
    def take(self, text: str) -> list[ChatTokenLogprob]:
        """Returns the log-probabilities of the tokens of the next text that was read from the
        pieces. Tokens before the text are dropped."""


class NoLogprobs(TextLogprobs):
    """Log-probabilities that the client does not ask for."""

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
        """Characters that the model has written after the last text that was taken."""
        self._n_taken = 0  # characters before `_written`
        self._tokens: deque[tuple[int, ChatTokenLogprob]] = deque()
        """Tokens with the number of characters of the answer before each."""

    def add(self, piece: Piece) -> None:
        self._written += piece.text
        if piece.logprobs is not None:
            listed = token_logprobs(self._texts, piece.token_ids, piece.logprobs, n_top=self._n_top)
            self._tokens.extend(zip(piece.text_offsets, listed, strict=True))

    def take(self, text: str) -> list[ChatTokenLogprob]:
        at = (
            len(self._written) - len(text)
            if self._written.endswith(text)
            else max(self._written.find(text), 0)
        )
        begin, end = self._n_taken + at, self._n_taken + at + len(text)
        found = []
        while self._tokens and self._tokens[0][0] < end:
            token_at, logprob = self._tokens.popleft()
            next_at = self._tokens[0][0] if self._tokens else end
            if token_at >= begin or next_at > begin:
                found.append(logprob)
        self._written = self._written[end - self._n_taken :]
        self._n_taken = end
        return found
