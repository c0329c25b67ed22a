"""The departure of a worker that must stop.

The worker goes on serving until its pipeline no longer needs it, but only for a limited time. Its
descriptions and its heartbeats tell the leader that it is leaving. The worker may end when nothing
has watched its stage for `LINGER_S` seconds: a leader that is replaced releases the stage, and the
next leader may need it. A worker that is in no pipeline ends at once.
"""

import asyncio
import math

LINGER_S = 15.0
"""Seconds in which another leader can take over the stage of a worker that is leaving. A leader
that hangs is replaced 8 s after its last renewal of the lease."""


class Departure:
    """Records whether this worker must stop, and when it ends at the latest."""

    def __init__(self) -> None:
        self._ends_at: float | None = None  # by the event loop's clock

    @property
    def has_begun(self) -> bool:
        """Whether the worker must stop."""
        return self._ends_at is not None

    @property
    def left_ms(self) -> int:
        """Milliseconds after which the worker ends at the latest, at least 1; 0 if the worker need
        not stop."""
        if self._ends_at is None:
            return 0
        return max(1, math.ceil(1000 * (self._ends_at - asyncio.get_running_loop().time())))

    def begin(self, limit_s: float) -> None:
        """Records that the worker must stop, and that it will end within `limit_s` seconds."""
        self._ends_at = asyncio.get_running_loop().time() + limit_s
