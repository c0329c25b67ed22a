"""The number of tokens that requests will generate, as learned from requests that have ended.

Clients set `max_tokens` and mostly use less. The fraction that is used depends on `max_tokens`, so
one fraction is kept for each power of two of `max_tokens`. The deviation of the fractions is
learned too. If all outputs are equally long, the end of an output can be predicted. If lengths vary
much, the number of tokens that a request has generated says nothing about how many will follow.
"""

from services.scheduler.core.request import Request

WEIGHT = 1 / 64
"""Weight of the last ended request in an average."""

N_NEEDED = 8
"""Number of requests that must have ended before the average of their lengths is used."""


class ExpectedOutput:
    """Learns which fraction of `max_tokens` requests use, and predicts the lengths of outputs."""

    def __init__(self) -> None:
        self._shares: dict[int, _Average] = {}  # by the bit length of `max_tokens`
        self._all = _Average()  # of the lengths of outputs, in tokens

    @property
    def is_known(self) -> bool:
        """Whether enough requests have ended to predict lengths."""
        return self._all.n >= N_NEEDED

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Learns that an ended request has generated `n_generated` tokens of `max_new_tokens`."""
        bits = max_new_tokens.bit_length()
        if bits not in self._shares:
            self._shares[bits] = _Average()
        self._shares[bits].learn(n_generated / max_new_tokens)
        self._all.learn(float(n_generated))

    def n_tokens(self, max_new_tokens: int) -> float:
        """Returns the expected number of output tokens of a request that has not begun."""
        share = self._shares.get(max_new_tokens.bit_length())
        if share is None or share.n < N_NEEDED:
            return min(self._all.mean, max_new_tokens)
        return share.mean * max_new_tokens

    def n_left(self, request: Request) -> float:
        """Returns the expected number of tokens that a running request has yet to generate."""
        n_generated = len(request.generated_token_ids)
        n_tokens = self.n_tokens(request.max_new_tokens)
        chance = self.variation(request.max_new_tokens) ** 2
        n_left = (1 - chance) * max(0.0, n_tokens - n_generated) + chance * n_tokens
        return min(max(1.0, n_left), request.max_new_tokens - n_generated)

    def variation(self, max_new_tokens: int) -> float:
        """Returns the relative deviation of output lengths. It is 0 if all lengths are equal. It is
        1 if the number of tokens that a request has generated says nothing about the number that
        will follow."""
        share = self._shares.get(max_new_tokens.bit_length())
        if share is None or share.n < N_NEEDED:
            return self._all.variation
        return share.variation


class _Average:
    """A running mean and deviation, in which older values count less."""

    __slots__ = ("_variance", "mean", "n")

    def __init__(self) -> None:
        self.n = 0
        self.mean = 0.0
        self._variance = 0.0

    @property
    def variation(self) -> float:
        return 0.0 if not self.mean else min(1.0, self._variance**0.5 / self.mean)

    def learn(self, value: float) -> None:
        self.n += 1
        weight = max(WEIGHT, 1 / self.n)
        difference = value - self.mean
        self.mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference**2)
