"""Clocks that set marks in a device's queue of work, to follow its progress and to measure times.

On a CPU, work is complete when its call returns. On a GPU, a call only queues work, and the next
iteration may be queued before the device begins the current one. So a mark is queued as well. It
has passed when the device has completed all work that was queued before the mark.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

_CPU = torch.device("cpu")


class DeviceClock(Protocol):
    """Makes marks: points in a device's queue of work, in the order in which work is launched."""

    def mark(self) -> Any:
        """Returns a mark at the end of the work that has been launched until now. The mark has
        passed when all this work is complete."""

    def has_passed(self, mark: Any) -> bool:
        """Returns whether the mark has passed. Does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Returns the time from the mark `start` to the mark `end` in nanoseconds. Call it only
        when both marks have passed."""


class HostClock:
    """A clock that waits for the device in `mark`, so that every mark has passed when it is
    returned."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._waits = device.type == "cuda"

    def mark(self) -> int:
        """Waits until the device has finished all launched work, and returns the time in
        nanoseconds as a mark."""
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def has_passed(self, mark: int) -> bool:
        """Returns True, because a mark of this clock has passed when it is returned."""
        return True

    def elapsed_ns(self, start: int, end: int) -> int:
        """Returns the time from the mark `start` to the mark `end` in nanoseconds."""
        return end - start


class StreamClock:
    """A clock whose marks are events in the current stream of a GPU; the host never waits."""

    def mark(self) -> Any:
        """Returns a mark at the end of the work that has been launched until now: an event in the
        current stream."""
        cuda: Any = torch.cuda  # its events have no type annotations
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        """Returns whether the device has reached the mark. Does not wait."""
        return bool(mark.query())

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Returns the time from the mark `start` to the mark `end` in nanoseconds. Call it only
        when both marks have passed."""
        return int(start.elapsed_time(end) * 1e6)
