"""The log-probabilities of the tokens of one answer, delivered together with the text of the
tokens.

A text that may be the beginning of a stop string is held back, and is dropped if it is. The
log-probabilities of its tokens are held back and dropped with the text, so a client never gets more
of an answer's tokens than of its text. A token whose text is delivered in part counts as delivered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.frontend.request.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Tokens of an answer, the position of each in the text, and their log-probabilities."""

    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """For each token, the number of characters of the answer before the token. A character made of
    several tokens belongs to the last of these tokens."""
    logprobs: Logprobs | None = None

    @classmethod
    def joined(cls, parts: Sequence["TokenScores"]) -> "TokenScores":
        """Joins `parts`, which are consecutive tokens of one answer."""
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        return cls(
            tuple(token_id for part in parts for token_id in part.token_ids),
            tuple(offset for part in parts for offset in part.offsets),
            Logprobs.joined(logprobs) if logprobs else None,
        )

    def part(self, start: int, stop: int) -> "TokenScores":
        """Returns the tokens from index `start` up to, but not including, `stop`."""
        return replace(
            self,
            token_ids=self.token_ids[start:stop],
            offsets=self.offsets[start:stop],
            logprobs=None if self.logprobs is None else self.logprobs.part(start, stop),
        )


class HeldScores:
    """Keeps tokens, with their log-probabilities, whose text is held back because it may be the
    beginning of a stop string."""

    def __init__(self) -> None:
        self._held = TokenScores()

    def add(self, new: TokenScores, *, n_delivered: int) -> TokenScores:
        """Adds the tokens `new` to the tokens that are held back. Then removes, and returns, the
        tokens that begin within the first `n_delivered` characters of the answer, which are the
        characters that have been delivered."""
        held = TokenScores.joined([self._held, new])
        n_taken = sum(offset < n_delivered for offset in held.offsets)
        self._held = held.part(n_taken, len(held.token_ids))
        return held.part(0, n_taken)

    def take_all(self) -> TokenScores:
        """Removes and returns all tokens that are held back."""
        held, self._held = self._held, TokenScores()
        return held
