"""Turns tokens into text while they are still coming.

A token is not a piece of text: one character may need several tokens, and the spacing of a token
may depend on the token before it. So text is always made from several tokens together (a window),
and `IncrementalText` delivers only text that no later token can change. Delivered text is never
taken back.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from services.frontend.text.token_texts import REPLACEMENT
from services.frontend.text.tokenizer import Tokenizer

_MAX_HELD = 3
"""Largest number of replacement characters that are held back at the end of a text. A character has
at most four bytes, so an incomplete one makes at most three."""

_CONTEXT_TOKENS = 6
"""Number of prompt tokens that are decoded together with the first token of an answer, to find out
whether a space comes before it. One prompt token would suffice if no token ended inside a
character."""

MAX_WINDOW_TOKENS = 32
"""Largest number of tokens that are decoded again for each new token. This number is reached only
if the output is not valid text."""


class IncrementalText:
    """Makes the text of a growing list of tokens, piece by piece. The cost of a token does not grow
    with the number of earlier tokens.

    If the text continues another text, `context` has the last tokens of that text. These tokens
    decide whether the new text starts with a space. All delivered pieces together equal `to_text`
    of all tokens, with one exception. Tokenizers that spell unknown characters byte by byte replace
    a whole run of bytes if any of it is invalid, including characters that were complete and have
    been delivered; here these characters stay.

    `marks` has the special tokens that are to have a text, each with its text. After each such
    token the text begins anew.
    """

    __slots__ = (
        "_delivered",
        "_is_whole",
        "_marks",
        "_n_settled",
        "_tokenizer",
        "_whole_text",
        "_window",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks or {}
        self._window: list[int] = []
        self._delivered = ""
        """Text that has been delivered, at the beginning of the text of the window."""
        if not tokenizer.token_texts.joins_bytes:  # otherwise the context changes nothing
            self._window, self._delivered = _clean_tail(tokenizer, context)
        self._n_settled = len(
            self._window
        )  # number of tokens at the beginning of the window that are all delivered
        self._is_whole = True  # the text of the window is complete and delivered
        self._whole_text = tokenizer.token_texts.whole_text

    def feed(self, token_id: int) -> str:
        """Takes one more token and returns the text that is now final."""
        if self._is_whole:
            text = self._whole_text(token_id)
            if text is not None:
                self._window, self._n_settled, self._delivered = [token_id], 1, text
                return text
        if self._tokenizer.is_silent(token_id):
            return self._mark(token_id) if token_id in self._marks else ""
        self._window.append(token_id)
        text = self._tokenizer.to_text(self._window)
        if not text.startswith(self._delivered):
            text = self._without_context()
        n_held = len(text) - len(text.rstrip(REPLACEMENT))
        is_garbage = n_held > 0 and len(self._window) > MAX_WINDOW_TOKENS
        if is_garbage:
            n_held = min(n_held, _MAX_HELD)
        piece = text[len(self._delivered) : len(text) - n_held]
        self._delivered += piece
        self._is_whole = n_held == 0
        if is_garbage:
            self._shorten(n_held)
        elif n_held == 0:
            self._settle()
        return piece

    def flush(self) -> str:
        """Ends the text and returns the part that was held back. `feed` must not be called
        afterwards."""
        if self._is_whole:
            return ""
        return self._tokenizer.to_text(self._window)[len(self._delivered) :]

    def _mark(self, token_id: int) -> str:
        piece = self.flush() + self._marks[token_id]
        self._window.clear()
        self._n_settled = 0
        self._delivered = ""
        self._is_whole = True
        return piece

    def _without_context(self) -> str:
        """Drops the context from the window, and returns the text of the other tokens. Called when
        the new token has changed the text of the context."""
        del self._window[: self._n_settled]
        self._n_settled = 0
        self._delivered = ""
        return self._tokenizer.to_text(self._window)

    def _settle(self) -> None:
        """Notes that all text has been delivered. The tokens since the last call of this method
        become the context of the next tokens; older tokens are dropped."""
        del self._window[: self._n_settled]
        self._n_settled = len(self._window)
        self._delivered = self._tokenizer.to_text(self._window)

    def _shorten(self, n_held: int) -> None:
        """Drops tokens that are too old to be part of an unfinished character."""
        del self._window[: -MAX_WINDOW_TOKENS // 2]
        self._n_settled = 0
        text = self._tokenizer.to_text(self._window)
        self._delivered = text[: len(text) - n_held]


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Returns, for each token, its beginning in the text of all tokens: the number of characters
    before it. A character made of several tokens belongs to the last of these tokens."""
    text = IncrementalText(tokenizer)
    offsets, n_characters = [], 0
    for token_id in token_ids:
        offsets.append(n_characters)
        n_characters += len(text.feed(token_id))
    return offsets


def _clean_tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[list[int], str]:
    """Returns some of the last tokens and their text. Tokens without text are left out, and as many
    tokens are taken as are needed for a text that begins with a whole character. Both results are
    empty if the text does not end, or cannot begin, with a whole character."""
    last = reversed(token_ids[-4 * _CONTEXT_TOKENS :])
    heard = (token_id for token_id in last if not tokenizer.is_silent(token_id))
    tail = [*islice(heard, _CONTEXT_TOKENS + 3)][::-1]
    for n_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + 4):
        text = tokenizer.to_text(tail[-n_tokens:])
        if text.endswith(REPLACEMENT):
            break
        if not text.startswith(REPLACEMENT):
            return tail[-n_tokens:], text
    return [], ""
