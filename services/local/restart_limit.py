"""Decides how often a service that does not become ready is restarted, and after which pauses."""

MAX_RESTARTS = 5
"""Largest number of restarts in a row of a service that does not become ready. After that it is not
restarted any more."""
FIRST_PAUSE_S = 0.5
"""Seconds of pause before the second restart of a service that has not become ready.

The first restart has no pause. The pause before each later restart is twice the previous one.
"""


class RestartLimit:
    """Counts the restarts of a service that does not become ready, and chooses the pauses before
    them."""

    def __init__(self, *, first_pause_s: float = FIRST_PAUSE_S, ready_pause_s: float = 0.0) -> None:
        """`first_pause_s` is the pause before the second restart of a service that does not become
        ready. `ready_pause_s` is the pause before the restart of a service that was ready. Both are
        in seconds."""
        self.n_failed = 0
        """Number of children in a row that have ended before they were ready."""
        self.first_pause_s = first_pause_s
        self._ready_pause_s = ready_pause_s

    def pause_s(self, *, was_ready: bool) -> float | None:
        """Returns the seconds to pause before the next restart, or None if the service must not be
        restarted.

        `was_ready` says whether the process that has just ended was ready.
        """
        if was_ready:
            self.n_failed = 0
            return self._ready_pause_s
        self.n_failed += 1
        if self.n_failed > MAX_RESTARTS:
            return None
        return self.first_pause_s * 2.0 ** (self.n_failed - 2) if self.n_failed > 1 else 0.0
