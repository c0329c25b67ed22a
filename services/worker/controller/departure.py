"""The departure of a worker that was told to stop.

The worker goes on serving until its pipeline has moved its requests, but only for a limited time.
Its descriptions and its heartbeats tell the leader that it is leaving. The worker may end when
nothing has watched its stage for `LINGER_S`: a leader that is replaced lets go of the stage, and
the next leader may need it. A worker that is in no pipeline ends at once.
"""

import asyncio
import math

LINGER_S = 15.0
"""Seconds that another leader has to take over the stage of a worker that is leaving. A leader that
hangs is replaced 8 s after it renewed its lease last."""


class Departure:
    """Whether this worker was told to stop, and the time that it has left."""

    def __init__(self) -> None:
        self._ends_at: float | None = None  # by the event loop's clock

    @property
    def has_begun(self) -> bool:
        """Whether the worker was told to stop."""
        return self._ends_at is not None

    @property
    def left_ms(self) -> int:
        """Milliseconds after which the worker ends at the latest, at least 1. It is 0 if the worker
        was not told to stop."""
        if self._ends_at is None:
            return 0
        return max(1, math.ceil(1000 * (self._ends_at - asyncio.get_running_loop().time())))

    def begin(self, limit_s: float) -> None:
        """Notes that the worker was told to stop, and ends after `limit_s` at the latest."""
        self._ends_at = asyncio.get_running_loop().time() + limit_s
