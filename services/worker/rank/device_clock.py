"""Marks in the work of a device, which show how far the device has come.

On a CPU, work is complete when its call returns. On a GPU, a call only queues work, and the next
iteration may be queued before the device begins the current one. So marks are queued as well, and
pass when the device reaches them.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

_CPU = torch.device("cpu")


class DeviceClock(Protocol):
    """Makes marks in the order of the launched work."""

    def mark(self) -> Any:
        """Returns a mark of the work that has been launched until now. The mark has passed when all
        this work is complete."""

    def has_passed(self, mark: Any) -> bool:
        """Returns whether the mark has passed. Does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Returns the nanoseconds between two marks that have passed."""


class HostClock:
    """A clock that waits for the device, so that its marks have passed when they are returned."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._waits = device.type == "cuda"

    def mark(self) -> int:
        """Implements `DeviceClock.mark`."""
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def has_passed(self, mark: int) -> bool:
        """Implements `DeviceClock.has_passed`."""
        return True

    def elapsed_ns(self, start: int, end: int) -> int:
        """Implements `DeviceClock.elapsed_ns`."""
        return end - start


class StreamClock:
    """A clock whose marks are events in the current stream of a GPU; the host never waits."""

    def mark(self) -> Any:
        """Implements `DeviceClock.mark`."""
        cuda: Any = torch.cuda  # its events have no type annotations
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        """Implements `DeviceClock.has_passed`."""
        return bool(mark.query())

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Implements `DeviceClock.elapsed_ns`."""
        return int(start.elapsed_time(end) * 1e6)
