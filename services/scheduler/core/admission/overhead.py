"""The overhead of an iteration, learned from iterations and expressed in prompt tokens.

The overhead is the number of prompt tokens that take as long as an iteration without prompt tokens.
The number is a power of two and is kept until measurements clearly contradict it. So it does not
change through random variation, through iterations that are all alike, or when the true overhead
lies between two powers of two.
"""

from math import isinf, log2

from services.scheduler.core.admission.iteration_time import IterationTime
from services.scheduler.core.admission.prompt_groups import FIRST_OVERHEAD_TOKENS

MIN_OVERHEAD_TOKENS, MAX_OVERHEAD_TOKENS = 8, 512

MARGIN = 2.0**0.75
"""The overhead is replaced if the measured overhead is certainly larger, or smaller, by this
factor. The factor is larger than the distance to the nearest power of two, so that the overhead
does not alternate between two powers."""

LOOK_N = 32
"""Number of iterations with prompt tokens between two checks of the overhead."""


class Overhead:
    """Learns the overhead of the iterations of one pipeline."""

    def __init__(self, time: IterationTime) -> None:
        self.n_tokens = FIRST_OVERHEAD_TOKENS
        """Number of prompt tokens that take as long as an iteration without prompt tokens."""
        self._time = time
        self._n_with_prompts = 0

    def note(self, n_prompt_tokens: int) -> None:
        """Notes an iteration with `n_prompt_tokens` prompt tokens. After every `LOOK_N` iterations
        that have prompt tokens, compares `n_tokens` with the learned times, and replaces it if it
        is clearly wrong. Must be called for each iteration, after `IterationTime` has learned from
        the iteration."""
        self._n_with_prompts += n_prompt_tokens > 0
        if self._n_with_prompts < LOOK_N or not self._time.is_known:
            return
        self._n_with_prompts = 0
        least, likely, most = self._time.overhead_tokens()
        if most * MARGIN < self.n_tokens or least > self.n_tokens * MARGIN:
            self.n_tokens = _power(likely)


def _power(n_tokens: float) -> int:
    """Returns the power of two that is nearest to `n_tokens`, within the limits of the overhead."""
    if isinf(n_tokens):
        return MAX_OVERHEAD_TOKENS
    nearest: int = 2 ** round(log2(max(1.0, n_tokens)))
    return min(max(MIN_OVERHEAD_TOKENS, nearest), MAX_OVERHEAD_TOKENS)
