"""One answer as it grows: turns new tokens into pieces of text, until the answer ends.

The module uses neither the scheduler nor the protocols of clients.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.frontend.generation.token_scores import HeldScores, TokenScores
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.logprobs import Logprobs
from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.stop_strings import StopStrings


@dataclass(slots=True)  # frozen, creation takes three times as long; each token creates one
class Piece:
    """A part of an answer: its new tokens and their text. The last piece of an answer says why the
    answer ended. A piece is never changed."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    scores: TokenScores | None = None
    """Log-probabilities of tokens, if the client requests them. If the client gets `token_ids`,
    these are the log-probabilities of `token_ids`. Otherwise they belong to the tokens of `text`,
    and are held back together with the text; then a stop string that is cut off has none."""
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens, without the first token. Only the first piece of an
    answer has this field, and only if the client requests log-probabilities of the prompt."""
    schema_valid: bool | None = None
    """Whether the values of the answer match their JSON schemas. Only the last piece of an answer
    whose values were checked has this field."""
    vector: bytes | None = None
    """Numbers of the vector of the prompt, each as a little-endian float of 4 bytes. Only requests
    for vectors have such a piece."""
    receipt: dict[str, Any] | None = None
    """Receipt of the answer. Only the last piece of an answer has this field, and only if the
    answer has a receipt."""

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """Joins the pieces of one answer into one piece. `pieces` must not be empty."""
        scores = [piece.scores for piece in pieces if piece.scores is not None]
        return cls(
            pieces[-1].index,
            "".join(piece.text for piece in pieces),
            tuple(itertools.chain.from_iterable(piece.token_ids for piece in pieces)),
            pieces[-1].finish_reason,
            TokenScores.joined(scores) if scores else None,
            pieces[0].prompt_logprobs,
            pieces[-1].schema_valid,
            next((piece.vector for piece in pieces if piece.vector is not None), None),
            pieces[-1].receipt,
        )

    @property
    def logprobs(self) -> Logprobs | None:
        """Log-probabilities in `scores`, if there are any."""
        return None if self.scores is None else self.scores.logprobs

    @property
    def n_logprobs(self) -> int:
        """Number of log-probabilities in the piece, including alternatives and the tokens of the
        prompt."""
        both = self.logprobs, self.prompt_logprobs
        return sum(logprobs.n_numbers for logprobs in both if logprobs is not None)


class Answer:
    """Turns the tokens of one answer into text.

    The scheduler ends an answer at one of `stop_token_ids`. Such a token adds no text, but counts
    as a token of the answer. This class finds stop strings, which end the answer once it has
    `min_tokens` tokens.
    """

    # With slots, the attributes that each token needs lie together in memory: hundreds of answers
    # do not fit into a processor's cache.
    __slots__ = (
        "_has_stops",
        "_held_scores",
        "_min_tokens",
        "_n_characters",
        "_n_delivered",
        "_offsets",
        "_prompt_logprobs",
        "_stop_token_ids",
        "_stops",
        "_text",
        "has_news",
        "index",
        "is_finished",
        "is_plain",
        "kept_tokens",
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
        has_scores: bool = False,
        shows_tokens: bool = False,
        keeps_tokens: bool = False,
    ) -> None:
        """`has_scores` says whether pieces get `scores`, `shows_tokens` whether the client also
        gets `token_ids`, and `keeps_tokens` whether `kept_tokens` is filled."""
        self.index = index
        self.n_tokens = 0
        self.has_news = False
        """Whether this call has generated tokens that the client did not have before the call."""
        self.is_finished = False
        self._text = text
        self._stops = stops
        self._has_stops = not stops.is_empty
        self.is_plain = not (self._has_stops or has_scores)
        """Whether a new token only adds text: the answer has no stop strings and no
        log-probabilities."""
        self.kept_tokens: list[int] | None = [] if keeps_tokens else None
        """All tokens of the answer so far, or None if they are not kept."""
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._offsets: list[int] | None = [] if has_scores else None  # offsets of the next piece
        is_held = has_scores and self._has_stops and not shows_tokens
        self._held_scores = HeldScores() if is_held else None
        self._n_characters = 0
        self._n_delivered = 0  # characters whose scores may be delivered
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
        if self.kept_tokens is not None:
            self.kept_tokens.extend(token_ids[:n_taken])
        piece = Piece(
            self.index,
            text,
            tuple(token_ids[:n_taken]),
            FinishReason.STOP if self.is_finished else None,
        )
        if self._offsets is None and not self._prompt_logprobs:
            return piece
        return self._with_scores(piece, logprobs)

    def add_plain(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns their text. May be called only while `is_plain` is true, so
        that stop strings and log-probabilities need no attention."""
        self.n_tokens += len(token_ids)
        if self.kept_tokens is not None:
            self.kept_tokens.extend(token_ids)
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
        return self._with_scores(Piece(self.index, text, (), reason), None)

    def _with_scores(self, piece: Piece, logprobs: Logprobs | None) -> Piece:
        """Returns the piece with its log-probabilities. The first piece of an answer also gets the
        log-probabilities of the prompt."""
        of_prompt = Logprobs.joined(self._prompt_logprobs) if self._prompt_logprobs else None
        self._prompt_logprobs.clear()
        return replace(piece, scores=self._scores(piece, logprobs), prompt_logprobs=of_prompt)

    def _scores(self, piece: Piece, logprobs: Logprobs | None) -> TokenScores | None:
        """Returns the log-probabilities that are delivered with a piece, or None if the client
        requests none. `logprobs` has the log-probabilities of the piece's own tokens. The
        log-probabilities of tokens whose text is held back are delivered with a later piece."""
        if self._offsets is None:
            return None
        if logprobs is not None:
            logprobs = logprobs.part(0, len(piece.token_ids))
        scores = TokenScores(piece.token_ids, tuple(self._offsets), logprobs)
        self._offsets.clear()
        if self._held_scores is None:
            return scores
        self._n_delivered += len(piece.text)
        delivered = self._held_scores.add(scores, n_delivered=self._n_delivered)
        if piece.finish_reason is None or self._stops.is_met:
            return delivered
        return TokenScores.joined([delivered, self._held_scores.take_all()])

    def _cut(self, text: str) -> str:
        return self._stops.feed(text, may_end=self.n_tokens >= self._min_tokens)
