"""The time that iterations take, as learned from iterations that have returned.

The model is a constant time per iteration plus a time per prompt token, fitted by least squares
over about the last hundred iterations. The rest of an iteration is one token of each decoding
request. That part hardly changes while requests wait, and forecasts are needed only while requests
wait.
"""

from math import inf, sqrt

WEIGHT = 1 / 128
"""Weight of the last iteration in the averages."""

N_NEEDED = 32
"""Number of iterations after which the times count as known."""

MAX_SURPRISE = 4.0
"""An iteration that takes longer than this multiple of the expected time counts as if it had taken
exactly this multiple. A single long time may have another cause on the machine. If the machine has
really become slow, the next iterations show it."""

DOUBT = 16.0**2
"""Number that is added to the variance of the number of prompt tokens, so that the learned time of
a token is small where that variance is small: differences in time then have other causes."""

N_ERRORS = 2.0
"""Half width of the confidence interval for the time of a token, in standard errors."""


class IterationTime:
    """Learns the seconds that an iteration takes, and the seconds that each prompt token adds."""

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
        """Learns from an iteration that had `n_prompt_tokens` prompt tokens and took `time_s`."""
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
        """Returns the number of prompt tokens that take as long as an iteration without prompt
        tokens: a lower bound, the most likely number, and an upper bound. If all iterations had the
        same number of prompt tokens, the result is 0, 0 and infinity. A number is infinite if
        iterations with more prompt tokens took no longer."""
        if not self._variance:
            return 0.0, 0.0, inf
        slope = self._covariance / self._variance
        scatter = max(0.0, self._variance_s / self._variance - slope**2)
        error = N_ERRORS * sqrt(scatter * max(WEIGHT, 1 / self._n))
        return self._base(slope + error), self._base(slope), self._base(slope - error)

    def _base(self, token_s: float) -> float:
        """Returns the time of an iteration without prompt tokens, divided by `token_s`, the time of
        a prompt token in seconds. Returns infinity if `token_s` is not positive."""
        return max(0.0, self._mean_s / token_s - self._mean_n_tokens) if token_s > 0 else inf
