"""When the device has got where, for ranks that wait for it and for ranks that do not.

A rank on a CPU does what it launches. One on a GPU only queues it, and may queue the next iteration
before the device has begun with it; so its marks are put into the queue, and pass when the device
comes by.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

_CPU = torch.device("cpu")


class DeviceClock(Protocol):
    """Marks in what is launched, one after the other."""

    def mark(self) -> Any:
        """Passes when all has been done that was launched before."""

    def has_passed(self, mark: Any) -> bool:
        """Whether it has; does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Between two marks that have passed."""


class HostClock:
    """Marks that have passed when they are returned; for that the host waits for `device`."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._waits = device.type == "cuda"

    def mark(self) -> int:
        """See `DeviceClock.mark`."""
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def has_passed(self, mark: int) -> bool:
        """See `DeviceClock.has_passed`."""
        return True

    def elapsed_ns(self, start: int, end: int) -> int:
        """See `DeviceClock.elapsed_ns`."""
        return end - start


class StreamClock:
    """Events in the current stream of a GPU; the host never waits."""

    def mark(self) -> Any:
        """See `DeviceClock.mark`."""
        cuda: Any = torch.cuda  # whose events have no types
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        """See `DeviceClock.has_passed`."""
        return bool(mark.query())

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """See `DeviceClock.elapsed_ns`."""
        return int(start.elapsed_time(end) * 1e6)
