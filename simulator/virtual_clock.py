"""The virtual time of a simulation, for code whose decisions depend on time.

A simulation normally advances to the next arrival or result. Code that waits for another point in
time, such as the end of a delay, sets this time with `wake_at`.
"""

from heapq import heappop, heappush


class VirtualClock:
    """The virtual time in seconds, and the times at which the simulation must select batches in any
    case."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """The virtual time in seconds, set by the simulation."""
        self._wakes_s: list[float] = []  # a heap

    def now(self) -> float:
        """Returns the virtual time in seconds; this method takes the place of `time.monotonic`."""
        return self.now_s

    def wake_at(self, time_s: float) -> None:
        """Makes the simulation select batches at `time_s`, even if no request arrives and no result
        comes then."""
        heappush(self._wakes_s, time_s)

    @property
    def next_wake_s(self) -> float:
        """The earliest time that was set by `wake_at` and not removed; infinity if there is
        none."""
        return self._wakes_s[0] if self._wakes_s else float("inf")

    def take_wake(self) -> None:
        """Removes the earliest time that was set by `wake_at`."""
        heappop(self._wakes_s)
