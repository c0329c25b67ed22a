"""The time of a simulation, for those whose decisions depend on it.

Who waits for a time that no request and no result brings, such as the end of a delay, asks to be
woken.
"""

from heapq import heappop, heappush


class VirtualClock:
    """The time now, in seconds, and the times at which somebody wants to be asked again."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """The virtual time; the simulation sets it."""
        self._wakes_s: list[float] = []  # a heap

    def now(self) -> float:
        """Returns the time, in the form in which the serving core asks for it."""
        return self.now_s

    def wake_at(self, time_s: float) -> None:
        """Has batches selected at a time at which nothing else may happen."""
        heappush(self._wakes_s, time_s)

    @property
    def next_wake_s(self) -> float:
        """The next time at which somebody wants to be woken; infinity where nobody does."""
        return self._wakes_s[0] if self._wakes_s else float("inf")

    def take_wake(self) -> None:
        """Takes the next time off."""
        heappop(self._wakes_s)
