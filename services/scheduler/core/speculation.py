"""How far the drafts of a request have been right, and when it is drafted for again."""

from dataclasses import dataclass

FIRST_LENGTH = 4
"""Tokens of a request's first draft."""

FIRST_ACCEPTANCE = 0.75
"""The acceptance that a request begins with, and begins anew with after a pause."""

WEIGHT = 0.25
"""Weight of the last draft in the acceptance."""

FIRST_PAUSE = 8
MAX_PAUSE = 256
"""Tokens without drafts, the first time and at most; each pause is twice the last one."""


@dataclass(slots=True)
class Speculation:
    """How far the drafts of one request have been right lately."""

    acceptance: float = FIRST_ACCEPTANCE
    """The fraction of drafted tokens that was right, recent ones counting more."""
    length: int = FIRST_LENGTH
    """Tokens of the next draft at most."""
    pause: int = FIRST_PAUSE
    """Tokens for which it stops the next time that drafts do not pay."""
    resumes_at: int = 0
    """Tokens of the sequence from which on it is drafted again."""

    def learn(self, n_drafted: int, n_right: int) -> None:
        """Takes in how many tokens of a draft were right."""
        self.acceptance += WEIGHT * (n_right / n_drafted - self.acceptance)
        if n_right == n_drafted:
            self.length = max(self.length, 2 * n_drafted)
            self.pause = FIRST_PAUSE
        else:
            self.length = n_right + 1

    def stop(self, n_tokens: int) -> None:
        """Stops drafts for a while, at `n_tokens` tokens of the sequence."""
        self.resumes_at = n_tokens + self.pause
        self.pause = min(2 * self.pause, MAX_PAUSE)
        self.acceptance, self.length = FIRST_ACCEPTANCE, FIRST_LENGTH
