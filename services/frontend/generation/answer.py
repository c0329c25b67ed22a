"""One answer as it grows: tokens come in, pieces of text go out, until something ends it.

The module knows neither the scheduler nor the clients.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.logprobs import Logprobs
from services.frontend.text.stop_strings import StopStrings
from services.frontend.text.tokenizer import IncrementalText


@dataclass(slots=True)  # frozen, creation takes three times as long; each token creates one
class Piece:
    """A part of an answer: its new tokens and their text. The last piece of an answer says why the
    answer ended. A piece is never changed."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    """Log-probabilities of `token_ids`, if the client wants them."""
    text_offsets: tuple[int, ...] = ()
    """For each token, the number of characters of the answer before the token. Empty unless the
    client wants log-probabilities. The text of a stop string is included. A character made of
    several tokens belongs to the last of these tokens."""
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens, without the first token. Only the first piece of an
    answer has this field, and only if the client wants log-probabilities of the prompt."""
    schema_valid: bool | None = None
    """Whether the values of the answer match their JSON schemas. Only the last piece of an answer
    whose values were checked has this field."""

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """Joins the pieces of one answer into one piece. There must be at least one."""
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        return cls(
            pieces[-1].index,
            "".join(piece.text for piece in pieces),
            tuple(itertools.chain.from_iterable(piece.token_ids for piece in pieces)),
            pieces[-1].finish_reason,
            Logprobs.joined(logprobs) if logprobs else None,
            tuple(itertools.chain.from_iterable(piece.text_offsets for piece in pieces)),
            pieces[0].prompt_logprobs,
            pieces[-1].schema_valid,
        )

    @property
    def n_logprobs(self) -> int:
        """Number of log-probabilities in the piece, including alternatives and the tokens of the
        prompt."""
        both = self.logprobs, self.prompt_logprobs
        return sum(logprobs.n_numbers for logprobs in both if logprobs is not None)


class Answer:
    """Turns the tokens of one answer into text.

    The scheduler ends an answer at one of `stop_token_ids`; such a token has no text here, but
    counts as a token of the answer. This class finds stop strings, which end the answer once it has
    `min_tokens` tokens.
    """

    # With slots, the attributes that each token needs lie together in memory: hundreds of answers
    # do not fit into a processor's cache.
    __slots__ = (
        "_has_stops",
        "_min_tokens",
        "_n_characters",
        "_offsets",
        "_prompt_logprobs",
        "_stop_token_ids",
        "_stops",
        "_text",
        "has_news",
        "index",
        "is_finished",
        "is_plain",
        "n_tokens",
    )

    def __init__(
        self,
        index: int,
        text: IncrementalText,
        *,
        stops: StopStrings,
        stop_token_ids: frozenset[int],
        min_tokens: int,
        has_offsets: bool = False,
    ) -> None:
        """`has_offsets` says whether pieces get `text_offsets`."""
        self.index = index
        self.n_tokens = 0
        self.has_news = False
        """Whether this call has brought tokens that the client did not have before the call."""
        self.is_finished = False
        self._text = text
        self._stops = stops
        self._has_stops = not stops.is_empty
        self.is_plain = not (self._has_stops or has_offsets)
        """Whether a new token only adds text. This is so if the answer has no stop strings, no text
        offsets and no log-probabilities of the prompt."""
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._offsets: list[int] | None = [] if has_offsets else None  # offsets of the next piece
        self._n_characters = 0
        self._prompt_logprobs: list[Logprobs] = []

    @property
    def stop_met(self) -> str:
        """Stop string that ended the answer. The value is empty if none did."""
        return self._stops.met

    def take_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Stores the log-probabilities of the prompt for the next piece."""
        self._prompt_logprobs.append(logprobs)
        self.is_plain = False

    def add(self, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> Piece:
        """Takes new tokens and returns the piece of the answer that they make. If a token completes
        a stop string, later tokens are left out."""
        if self.is_plain:
            return Piece(self.index, self.add_plain(token_ids), tuple(token_ids))
        text, n_taken = "", 0
        for token_id in token_ids:
            self.n_tokens += 1
            n_taken += 1
            if self._offsets is not None:
                self._offsets.append(self._n_characters)
            if token_id not in self._stop_token_ids:
                new = self._text.feed(token_id)
                self._n_characters += len(new)
                text += self._cut(new) if self._has_stops else new
            if self._stops.is_met:
                self.is_finished = True
                break
        piece = Piece(
            self.index,
            text,
            tuple(token_ids[:n_taken]),
            FinishReason.STOP if self.is_finished else None,
        )
        if self._offsets is None and not self._prompt_logprobs:
            return piece
        return self._with_logprobs(piece, logprobs)

    def add_plain(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens of an answer whose `is_plain` is true, and returns the new text."""
        self.n_tokens += len(token_ids)
        text = ""
        for token_id in token_ids:
            if token_id not in self._stop_token_ids:
                text += self._text.feed(token_id)
        return text

    def finish(self, reason: FinishReason) -> Piece:
        """Ends the answer and returns its last piece, with the text that was held back until
        now."""
        text = self._cut(self._text.flush()) + self._stops.flush()
        self.is_finished = True
        reason = FinishReason.STOP if self._stops.is_met else reason
        return self._with_logprobs(Piece(self.index, text, (), reason), None)

    def _with_logprobs(self, piece: Piece, logprobs: Logprobs | None) -> Piece:
        """Returns the piece with the log-probabilities of its tokens. The first piece of an answer
        also gets the log-probabilities of the prompt."""
        of_prompt = Logprobs.joined(self._prompt_logprobs) if self._prompt_logprobs else None
        offsets = tuple(self._offsets or ())
        self._prompt_logprobs.clear()
        if self._offsets is not None:
            self._offsets.clear()
        return replace(
            piece,
            logprobs=None if logprobs is None else logprobs.part(0, len(piece.token_ids)),
            text_offsets=offsets,
            prompt_logprobs=of_prompt,
        )

    def _cut(self, text: str) -> str:
        return self._stops.feed(text, may_end=self.n_tokens >= self._min_tokens)
