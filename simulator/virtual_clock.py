"""The time of a simulation, for code whose decisions depend on it.

Code that waits for a time which no request and no result brings, such as the end of a delay, asks
to be woken.
"""

from heapq import heappop, heappush


class VirtualClock:
    """The time now, in seconds, and the times at which a waiter wants to be woken."""

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
        """The next time at which a waiter wants to be woken; infinity if there is none."""
        return self._wakes_s[0] if self._wakes_s else float("inf")

    def take_wake(self) -> None:
        """Takes the next time off."""
        heappop(self._wakes_s)
