"""One answer as it grows: tokens in, pieces of text out, until something ends it.

Pure: it knows neither the scheduler nor the clients.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.stop_strings import StopStrings
from services.frontend.text.tokenizer import IncrementalText


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: the tokens and the text that are new. The last one says why the answer
    ended."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """Returns all pieces of an answer, at least one, as one piece."""
        return cls(
            pieces[-1].index,
            "".join(piece.text for piece in pieces),
            tuple(itertools.chain.from_iterable(piece.token_ids for piece in pieces)),
            pieces[-1].finish_reason,
        )


class Answer:
    """Turns the tokens of one answer into text.

    `stop_token_ids` end the answer: the scheduler sees to that, and here they have no text, but
    they count. Stop strings end it here, once it has `min_tokens` tokens.
    """

    def __init__(
        self,
        index: int,
        text: IncrementalText,
        *,
        stops: StopStrings,
        stop_token_ids: frozenset[int],
        min_tokens: int,
    ) -> None:
        self.index = index
        self.n_tokens = 0
        self.is_finished = False
        self._text = text
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens

    @property
    def stop_met(self) -> str:
        """The stop string that ended the answer, or nothing."""
        return self._stops.met

    def add(self, token_ids: Iterable[int]) -> Piece:
        """Takes new tokens and returns their piece; tokens after the one that completes a stop
        string are left out."""
        text: list[str] = []
        taken: list[int] = []
        for token_id in token_ids:
            self.n_tokens += 1
            taken.append(token_id)
            if token_id not in self._stop_token_ids:
                text.append(self._cut(self._text.feed(token_id)))
            if self._stops.is_met:
                return self._end("".join(text), tuple(taken), FinishReason.STOP)
        return Piece(self.index, "".join(text), tuple(taken))

    def finish(self, reason: FinishReason) -> Piece:
        """Ends the answer and returns its last piece, with the text that was held back."""
        text = self._cut(self._text.flush()) + self._stops.flush()
        return self._end(text, (), FinishReason.STOP if self._stops.is_met else reason)

    def _cut(self, text: str) -> str:
        return self._stops.feed(text, may_end=self.n_tokens >= self._min_tokens)

    def _end(self, text: str, token_ids: tuple[int, ...], reason: FinishReason) -> Piece:
        self.is_finished = True
        return Piece(self.index, text, token_ids, reason)
