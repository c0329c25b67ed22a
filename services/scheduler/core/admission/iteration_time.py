"""The time that iterations take, as learned from iterations that have returned.

It is a time for each iteration plus one for each prompt token in it, by least squares over about
the last hundred iterations. The rest of an iteration, one token of each decoding request, is much
the same in each while requests wait, and only then is a forecast asked for."""

from math import inf, sqrt

WEIGHT = 1 / 128
"""The weight of the last iteration."""

N_NEEDED = 32
"""Number of iterations from which on times are known."""

MAX_SURPRISE = 4.0
"""An iteration counts as at most this multiple of its expected time: the machine may have done
something else, and if it has become slow, the next iterations show it."""

DOUBT = 16.0**2
"""Added to the variance of prompt tokens: where that is small, differences in time have other
causes."""

N_ERRORS = 2.0
"""Width of the interval for the seconds of a token, in standard errors."""


class IterationTime:
    """Seconds for each iteration, and for each token of prompts in it."""

    def __init__(self) -> None:
        self.base_s = 0.0
        """Seconds of an iteration without tokens of prompts."""
        self.token_s = 0.0
        """Seconds that each prompt token adds."""
        self._n = 0
        self._mean_n_tokens = 0.0
        self._mean_s = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._variance_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough iterations have returned."""
        return self._n >= N_NEEDED

    def learn(self, n_prompt_tokens: int, time_s: float) -> None:
        """Takes in the time of an iteration with so many prompt tokens."""
        if self.is_known:
            expected_s = self.base_s + self.token_s * n_prompt_tokens
            time_s = min(time_s, MAX_SURPRISE * expected_s)
        self._n += 1
        weight = max(WEIGHT, 1 / self._n)
        n_more, s_more = n_prompt_tokens - self._mean_n_tokens, time_s - self._mean_s
        self._mean_n_tokens += weight * n_more
        self._mean_s += weight * s_more
        self._variance = (1 - weight) * (self._variance + weight * n_more**2)
        self._covariance = (1 - weight) * (self._covariance + weight * n_more * s_more)
        self._variance_s = (1 - weight) * (self._variance_s + weight * s_more**2)
        slope = self._covariance / (self._variance + DOUBT)
        most = self._mean_s / self._mean_n_tokens if self._mean_n_tokens else 0.0
        self.token_s = min(max(0.0, slope), most)
        self.base_s = max(0.0, self._mean_s - self.token_s * self._mean_n_tokens)

    def overhead_tokens(self) -> tuple[float, float, float]:
        """Returns how many tokens of prompts take as long as an iteration without them: at least,
        most likely, and at most. Where sizes or times hardly differ, that is from 0 to infinity."""
        if not self._variance:
            return 0.0, 0.0, inf
        slope = self._covariance / self._variance
        scatter = max(0.0, self._variance_s / self._variance - slope**2)
        error = N_ERRORS * sqrt(scatter * max(WEIGHT, 1 / self._n))
        return self._base(slope + error), self._base(slope), self._base(slope - error)

    def _base(self, token_s: float) -> float:
        """Returns the time of an iteration without prompts, in tokens that take so long."""
        return max(0.0, self._mean_s / token_s - self._mean_n_tokens) if token_s > 0 else inf
