"""Marks in a device's work, which tell how far the device has come.

A rank on a CPU has done what it has launched. A rank on a GPU has only queued it, and may queue the
next iteration before the device begins with this one. So its marks are queued too, and pass when
the device reaches them.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

_CPU = torch.device("cpu")


class DeviceClock(Protocol):
    """A maker of marks, in the order of what is launched."""

    def mark(self) -> Any:
        """Returns a mark that passes when everything launched before it has been done."""

    def has_passed(self, mark: Any) -> bool:
        """Returns whether the mark has passed; does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Returns the nanoseconds between two marks that have passed."""


class HostClock:
    """A clock whose marks have passed when they are returned: the host waits for the device."""

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
    """A clock of events in the current stream of a GPU; the host never waits."""

    def mark(self) -> Any:
        """Implements `DeviceClock.mark`."""
        cuda: Any = torch.cuda  # whose events have no types
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        """Implements `DeviceClock.has_passed`."""
        return bool(mark.query())

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Implements `DeviceClock.elapsed_ns`."""
        return int(start.elapsed_time(end) * 1e6)
