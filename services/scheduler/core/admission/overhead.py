"""The overhead of an iteration, in prompt tokens that take as long, as learned from iterations.

It is a power of two and stays what it is until measurements contradict it. Neither chance changes
it, nor iterations that are all alike, nor an overhead between two powers.
"""

from math import isinf, log2

from services.scheduler.core.admission.iteration_time import IterationTime
from services.scheduler.core.admission.prompt_groups import FIRST_OVERHEAD_TOKENS

MIN_OVERHEAD_TOKENS, MAX_OVERHEAD_TOKENS = 8, 512

MARGIN = 2.0**0.75
"""The overhead changes if it is certainly larger, or smaller, by this factor: more than the way to
the nearest power of two, so that it does not alternate between two."""

LOOK_N = 32
"""Number of iterations with prompt tokens between two looks."""


class Overhead:
    """The overhead of the iterations of one pipeline."""

    def __init__(self, time: IterationTime) -> None:
        self.n_tokens = FIRST_OVERHEAD_TOKENS
        """Prompt tokens that take as long as an iteration without any."""
        self._time = time
        self._n_with_prompts = 0

    def note(self, n_prompt_tokens: int) -> None:
        """Looks at the learned times from time to time; called for each iteration, after it was
        learned, with its prompt tokens."""
        self._n_with_prompts += n_prompt_tokens > 0
        if self._n_with_prompts < LOOK_N or not self._time.is_known:
            return
        self._n_with_prompts = 0
        least, likely, most = self._time.overhead_tokens()
        if most * MARGIN < self.n_tokens or least > self.n_tokens * MARGIN:
            self.n_tokens = _power(likely)


def _power(n_tokens: float) -> int:
    """Returns the nearest power of two within the limits."""
    if isinf(n_tokens):
        return MAX_OVERHEAD_TOKENS
    nearest: int = 2 ** round(log2(max(1.0, n_tokens)))
    return min(max(MIN_OVERHEAD_TOKENS, nearest), MAX_OVERHEAD_TOKENS)
