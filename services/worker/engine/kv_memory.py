"""Computes how much memory of a GPU is left for keys and values.

    fraction of the total - used - iteration - transfers - graphs

The operator sets the fraction; the rest of the GPU is for NCCL and for fragmentation. `used` is
measured when the weights are loaded, and includes other processes and the driver. `iteration` is
measured by running an iteration. `transfers` is computed: the hidden states of further iterations
in flight. `graphs` is computed as well: a reserve for CUDA graphs. Only `GpuMemory` uses the GPU;
the other code computes with numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from services.common.cannot_start import CannotStart

_GIB = 1 << 30


class NoMemoryLeft(CannotStart):
    """No memory is left for keys and values. The error's message has the numbers of bytes and names
    the settings."""


class DeviceMemory(Protocol):
    """The memory of a device. Methods return numbers of bytes."""

    def total(self) -> int:
        """Returns the size of the memory."""

    def used(self) -> int:
        """Returns the number of bytes that all processes use, without bytes that this process could
        free at once."""

    def peak_of(self, run: Callable[[], None]) -> int:
        """Calls `run`. Returns the peak memory use during the call minus the use before the call,
        in bytes."""


class GpuMemory:
    """The memory of the current GPU."""

    def total(self) -> int:
        """Implements `DeviceMemory.total`."""
        return torch.cuda.mem_get_info()[1]

    def used(self) -> int:
        """Implements `DeviceMemory.used`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def peak_of(self, run: Callable[[], None]) -> int:
        """Implements `DeviceMemory.peak_of`."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The total memory of a device, and the number of bytes for each purpose (see the module's
    docstring)."""

    total: int
    used: int
    iteration: int
    transfers: int
    graphs: int

    def kv_memory(self, fraction: float) -> int:
        """Returns the number of bytes for keys and values, if the process may use the given
        `fraction` of the total.

        Raises:
            NoMemoryLeft: the other uses leave no memory.
        """
        needed = self.used + self.iteration + self.transfers + self.graphs
        left = int(self.total * fraction) - needed
        if left <= 0:
            raise NoMemoryLeft(
                f"kv_memory auto: device_memory_fraction {fraction:g} of {_gib(self.total)} leaves "
                f"nothing for keys and values: {_gib(self.used)} are in use, an iteration of "
                f"trial_tokens takes {_gib(self.iteration)}, others on their way take "
                f"{_gib(self.transfers)}, and {_gib(self.graphs)} are for graphs"
            )
        return left


def transfer_bytes(
    hidden_bytes: int, *, stage_index: int, n_stages: int, max_pending_sends: int
) -> int:
    """Returns the largest number of bytes that hidden states in flight may take on a rank, without
    the hidden states of the iteration that is being computed. An iteration has `hidden_bytes` bytes
    of hidden states.

    The scheduler's default depth is assumed: one iteration in flight for each stage, and at least
    two. A rank allocates hidden states for all announced iterations, and keeps hidden states that
    it has sent until they have arrived.
    """
    n_others = max(n_stages, 2) - 1
    n_received = n_others if stage_index > 0 else 0
    n_sent = min(n_others, max_pending_sends) if stage_index + 1 < n_stages else 0
    return (n_received + n_sent) * hidden_bytes


def measure(
    memory: DeviceMemory, iteration: Callable[[], None], *, transfers: int, graphs: int
) -> MemoryShares:
    """Measures how the memory of a device is used. Call it when everything except K/V is loaded.

    `iteration` is run twice, because the first run also compiles kernels and allocates memory that
    stays in use.
    """
    iteration()
    peak = memory.peak_of(iteration)
    return MemoryShares(memory.total(), memory.used(), peak, transfers, graphs)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.2f} GiB"
