"""Pauses of growing length between attempts to connect to a scheduler."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Computes pauses that grow with each failure. Pauses are random, so that frontends do not all
    connect at the same time."""

    first_s: float = 0.05
    max_s: float = 1.0

    def pause_s(self, n_failures: int) -> float:
        """Returns the pause, in seconds, after `n_failures` consecutive failures. The number must
        be at least 1."""
        longest = min(self.max_s, self.first_s * 2.0 ** min(n_failures - 1, 16))
        return random.uniform(longest / 2, longest)
