"""The number of tokens for which a request reserves memory when it is admitted.

With the paper's admission, a request reserves memory for the largest number of tokens that its
sequence can reach. With optimistic admission, a request reserves the memory that it is expected to
need. At any time, some running requests have just begun and others are about to end. So on average
a request holds half of the memory that it uses at its end, and a new request reserves about that
much. The larger the fraction of `max_tokens` that requests use, the less memory optimistic
admission saves, and the more recomputation it costs. If requests use all of `max_tokens`, a request
reserves memory for all of it.
"""

import math

from services.scheduler.core.memory.holder import Holder

MIN_SHARE = 1 / 16
"""Smallest fraction of the remaining `max_tokens` for which a preempted request reserves memory."""

MAX_OWN_PREEMPTIONS = 1 + round(math.log2(1 / MIN_SHARE))
"""Number of preemptions after which a request reserves memory for its longest possible sequence."""


class WholeLife:
    """The paper's reservation: a request reserves memory for its longest possible sequence."""

    may_be_exceeded = False
    """Whether a request may come to need more memory than it has reserved."""

    def n_tokens(self, request: Holder) -> int:
        """Returns the number of tokens for which a request reserves memory when it is admitted."""
        return request.max_sequence_len

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Does nothing: reservations do not depend on ended requests."""


class ExpectedUse:
    """The optimistic reservation: it depends on the fraction of `max_tokens` that ended requests
    have used."""

    may_be_exceeded = True

    FIRST_GUESS = 1 / 4
    """The fraction of `max_tokens` that is assumed before any request has ended. The guess counts
    as one ended request. Clients that set no `max_tokens` use a small part of the default, so with
    a guess of 1 the first of their requests would reserve all memory."""

    N_AVERAGED = 16
    """Number of ended requests over which the fraction is averaged. The average is a plain mean
    until that many requests have ended. Then it is a moving average, in which the last request has
    the weight 1 / `N_AVERAGED`."""

    def __init__(self) -> None:
        self.share = self.FIRST_GUESS
        self._n_learnt = 1

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Learns that an ended request has generated `n_generated` tokens of `max_new_tokens`."""
        self._n_learnt = min(self._n_learnt + 1, self.N_AVERAGED)
        self.share += (n_generated / max_new_tokens - self.share) / self._n_learnt

    def n_tokens(self, request: Holder) -> int:
        """Returns the number of tokens for which a request reserves memory when it is admitted.
        After its first preemption, a request reserves memory for all its known tokens and a part of
        its remaining tokens: the fraction that other requests use. With each further preemption the
        fraction doubles."""
        if request.n_preemptions:
            share = max(self.share, MIN_SHARE) * 2.0 ** (request.n_preemptions - 1)
        else:
            share = self.share * (1 + self.share) / 2
        n_left = request.max_sequence_len - request.n_tokens
        return request.n_tokens + math.ceil(min(1.0, share) * n_left)
