"""The tokens for which a request reserves memory when it is admitted.

With the paper's admission these are the tokens of its whole life. Where admission is optimistic it
is what the request is expected to need: requests that run are at all points of their lives, so that
they hold half in the mean of what they use in the end, and a new one reserves about that. The
larger the share of `max_tokens` that requests use, the less there is to win and the more there is
to recompute: where they use all, a request reserves all.
"""

import math

from services.scheduler.core.memory.holder import Holder

MIN_SHARE = 1 / 16
"""The share of its remaining `max_tokens` that a preempted request reserves at least."""

MAX_OWN_PREEMPTIONS = 1 + round(math.log2(1 / MIN_SHARE))
"""Preemptions after which a request reserves its whole life."""


class WholeLife:
    """The paper's reservation: all tokens that a request may come to."""

    may_be_exceeded = False
    """Whether a request may need more than it has reserved."""

    def n_tokens(self, request: Holder) -> int:
        """Returns the tokens for which a request reserves memory when it is admitted."""
        return request.max_sequence_len

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Learns nothing from a request that has ended."""


class ExpectedUse:
    """The share of `max_tokens` that requests use, as learned from requests that have ended."""

    may_be_exceeded = True

    WEIGHT = 1 / 16
    """The weight of the last request in the share."""

    def __init__(self) -> None:
        self.share = 1.0

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Takes in how many of its `max_new_tokens` a request has generated."""
        self.share += self.WEIGHT * (n_generated / max_new_tokens - self.share)

    def n_tokens(self, request: Holder) -> int:
        """Returns the tokens for which a request reserves memory when it is admitted. A preempted
        request reserves the share that others use of what is left to it, and twice as much each
        time."""
        if request.n_preemptions:
            share = max(self.share, MIN_SHARE) * 2.0 ** (request.n_preemptions - 1)
        else:
            share = self.share * (1 + self.share) / 2
        n_left = request.max_sequence_len - request.n_tokens
        return request.n_tokens + math.ceil(min(1.0, share) * n_left)
