"""How soon a late pipeline is suspected, where other pipelines serve.

A suspicion that turns out wrong costs a new epoch. On a machine that is often late, for example
because its processors are shared, suspicions would follow each other. So each suspicion doubles the
time until the next one, and the time halves with each minute without a suspicion.
"""

import asyncio

SUSPICION_S = 1.5
"""Seconds beyond a multiple of the expected time after which an iteration is suspiciously late."""

MAX_SUSPICION_S = 60.0
"""Largest number of seconds to which the time grows."""

QUIET_S = 60.0
"""Seconds without a suspicion after which the time halves."""


class Suspicion:
    """The time after which late iterations are suspicious, for all pipelines of a leader."""

    def __init__(self) -> None:
        self._limit_s = SUSPICION_S
        self._noted_at = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds beyond a multiple of the expected time."""
        quiet_s = asyncio.get_running_loop().time() - self._noted_at
        return max(SUSPICION_S, self._limit_s * 0.5 ** int(quiet_s / QUIET_S))

    def note(self) -> None:
        """Notes that a pipeline was given up because it was late."""
        self._limit_s = min(2 * self.limit_s, MAX_SUSPICION_S)
        self._noted_at = asyncio.get_running_loop().time()
