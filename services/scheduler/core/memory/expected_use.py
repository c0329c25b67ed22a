"""The memory that a request is expected to need, where admission is optimistic.

Requests that run are at all points of their lives, so that they hold half in the mean of what they
use in the end. A new one reserves about that. The larger the share of `max_tokens` that requests
use, the less there is to win and the more there is to recompute: where they use all, it reserves
all.
"""

import math

from services.scheduler.core.request import Request

MIN_SHARE = 1 / 16
"""The share that one which was put down reserves at least."""

MAX_OWN_PUT_DOWNS = 1 + round(math.log2(1 / MIN_SHARE))
"""Times after which one that was put down reserves its whole life."""


class ExpectedUse:
    """The share of `max_tokens` that requests use, as learned from those that have ended."""

    WEIGHT = 1 / 16
    """The weight of the last request."""

    def __init__(self) -> None:
        self.share = 1.0

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Takes in what a request has used."""
        self.share += self.WEIGHT * (n_generated / max_new_tokens - self.share)

    def n_tokens(self, request: Request) -> int:
        """Returns the tokens for which a request reserves memory when it is admitted: one that was
        put down the share of what is left to it that others use, and twice as much each time."""
        if request.n_put_downs:
            share = max(self.share, MIN_SHARE) * 2.0 ** (request.n_put_downs - 1)
        else:
            share = self.share * (1 + self.share) / 2
        n_left = request.max_sequence_len - request.n_tokens
        return request.n_tokens + math.ceil(min(1.0, share) * n_left)
