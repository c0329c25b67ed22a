"""The success of a request's drafts so far, and the point from which the request gets drafts
again."""

from dataclasses import dataclass

FIRST_LENGTH = 4
"""Number of tokens in a request's first draft."""

FIRST_ACCEPTANCE = 0.75
"""Initial acceptance of a request, and its acceptance after each pause."""

WEIGHT = 0.25
"""Weight of the last draft in the acceptance."""

FIRST_PAUSE = 8
MAX_PAUSE = 256
"""Number of tokens without drafts in the first pause, and in the longest one; each pause is twice
as long as the last one."""


@dataclass(slots=True)
class Speculation:
    """Record of how successful the drafts of one request have been lately."""

    acceptance: float = FIRST_ACCEPTANCE
    """Fraction of drafted tokens that were right; recent drafts count more."""
    length: int = FIRST_LENGTH
    """Largest number of tokens in the next draft."""
    pause: int = FIRST_PAUSE
    """Number of tokens for which drafting will stop the next time that drafts do not pay."""
    resumes_at: int = 0
    """Length of the sequence, in tokens, from which on the request gets drafts again."""

    def learn(self, n_drafted: int, n_right: int) -> None:
        """Learns that `n_right` of the `n_drafted` tokens in a draft were right."""
        self.acceptance += WEIGHT * (n_right / n_drafted - self.acceptance)
        if n_right == n_drafted:
            self.length = max(self.length, 2 * n_drafted)
            self.pause = FIRST_PAUSE
        else:
            self.length = n_right + 1

    def stop(self, n_tokens: int) -> None:
        """Stops drafting for a while, when the sequence has `n_tokens` tokens."""
        self.resumes_at = n_tokens + self.pause
        self.pause = min(2 * self.pause, MAX_PAUSE)
        self.acceptance, self.length = FIRST_ACCEPTANCE, FIRST_LENGTH
