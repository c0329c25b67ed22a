"""Pauses between attempts to connect to a scheduler."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow with each failure. They are random, so that frontends do not all connect at
    once."""

    first_s: float = 0.05
    max_s: float = 1.0

    def pause_s(self, n_failures: int) -> float:
        """Returns the pause, in seconds, after `n_failures` failures in a row. `n_failures` is at
        least 1."""
        longest = min(self.max_s, self.first_s * 2.0 ** min(n_failures - 1, 16))
        return random.uniform(longest / 2, longest)
