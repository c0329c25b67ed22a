"""The success of a request's drafts so far, and the length at which the request gets drafts again
after a pause."""

from dataclasses import dataclass

FIRST_LENGTH = 4
"""Largest number of tokens in a request's first draft, and in the first draft after a pause."""

FIRST_ACCEPTANCE = 0.75
"""Fraction of drafted tokens that is assumed to be right before a request's first draft, and again
after each pause."""

WEIGHT = 0.25
"""Weight of the last draft in the running mean of the fraction of right tokens."""

FIRST_PAUSE = 8
MAX_PAUSE = 256
"""Length of the first pause in drafting and of the longest pause, in output tokens. Each pause is
twice as long as the pause before."""


@dataclass(slots=True)
class Speculation:
    """Record of how successful the drafts of one request have been lately."""

    acceptance: float = FIRST_ACCEPTANCE
    """Fraction of drafted tokens that were right; recent drafts count more."""
    length: int = FIRST_LENGTH
    """Largest number of tokens in the next draft."""
    pause: int = FIRST_PAUSE
    """Length of the next pause in drafting, in output tokens. The pause begins when drafts are
    wrong too often."""
    resumes_at: int = 0
    """Length of the sequence, in tokens, at which the request gets drafts again after a pause."""

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
