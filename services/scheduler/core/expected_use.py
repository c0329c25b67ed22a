"""The memory that a request is expected to need, where admission is optimistic."""

import math

from services.scheduler.core.request import Request


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
        """Returns the tokens for which a request reserves memory when it is admitted."""
        if request.n_put_downs:
            return request.max_sequence_len
        n_left = request.max_sequence_len - request.n_tokens
        return request.n_tokens + math.ceil(self.share * n_left)
