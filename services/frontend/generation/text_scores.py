"""The log-probabilities of the tokens that make each text of a message.

A model writes reasoning, content and calls one after the other, with markers such as tags in
between. The message reader, which separates them, may hold characters back. So the
log-probabilities of tokens are kept until the reader returns the text that the tokens make. A text
is found by its position among the characters that the model has written, not by its words: the same
words may occur twice. A token that is partly inside a text counts as a token of the text. White
space that is read before reasoning, but becomes content at the end of the answer, has no tokens.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from services.frontend.generation.token_scores import TokenScores
from services.frontend.request.logprobs import LOGPROB_BYTES
from services.frontend.text.message_reader import Words


class TextScores:
    """Finds the tokens of each text of one answer. The texts must be taken in the order in which
    the message reader returns them."""

    def __init__(self, keep: Callable[[int], None]) -> None:
        """`keep` is called with a number of bytes: it takes them from the memory budget, or gives
        them back if the number is negative."""
        self._keep = keep
        self._held: deque[TokenScores] = deque()
        """Tokens after the text that `take` was last called with. No entry is empty."""

    def add(self, scores: TokenScores | None) -> None:
        """Keeps the next tokens of the answer with their log-probabilities, if there are any."""
        if scores is not None and scores.token_ids:
            self._keep(_n_bytes(scores))
            self._held.append(scores)

    def close(self) -> None:
        """Drops all tokens that `take` has not returned. Call it when the answer has ended."""
        while self._held:
            self._keep(-_n_bytes(self._held.popleft()))

    def take(self, words: Words) -> TokenScores:
        """Returns the tokens that make the text `words`, including a token that begins before the
        text and ends in it. All earlier tokens are dropped."""
        before = self._take_up_to(words.end)
        begin, n_tokens = words.end - len(words.text), len(before.token_ids)
        first = bisect_left(before.offsets, begin)
        if first and (first == n_tokens or before.offsets[first] > begin):
            first -= 1  # this token begins before the text and ends inside it
        return before.part(first, n_tokens)

    def _take_up_to(self, end: int) -> TokenScores:
        """Removes the tokens that begin before the character `end` of the answer, and returns
        them."""
        found = []
        while self._held and self._held[0].offsets[0] < end:
            scores = self._held.popleft()
            self._keep(-_n_bytes(scores))
            n_found = bisect_left(scores.offsets, end)
            if n_found < len(scores.offsets):
                rest = scores.part(n_found, len(scores.offsets))
                self._keep(_n_bytes(rest))
                self._held.appendleft(rest)
            found.append(scores.part(0, n_found))
        return TokenScores.joined(found)


def keep_nothing(n_bytes: int) -> None:
    """Does nothing. Used as `keep` for an answer whose tokens all come at once, and whose memory is
    counted elsewhere."""


def _n_bytes(scores: TokenScores) -> int:
    """Returns the largest memory, in bytes, that the log-probabilities in `scores` may take."""
    return 0 if scores.logprobs is None else LOGPROB_BYTES * scores.logprobs.n_numbers
