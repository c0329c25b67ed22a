"""How much memory of a GPU keys and values may have: what nothing else needs.

    fraction of the whole - what is in use - an iteration - what is on its way - graphs

The first is the operator's; the second is known when the weights are loaded, and includes what
other processes and the driver have; the third is found out by trying; the fourth are the hidden
states of further iterations in flight, and is computed; the fifth is set aside. What the fraction
leaves is for NCCL and for fragments. Numbers only; who asks the GPU is `GpuMemory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_GIB = 1 << 30


class NoMemoryLeft(ValueError):
    """Nothing is left for keys and values; the message has the figures and names the settings."""


class DeviceMemory(Protocol):
    """What a device says of its memory, in bytes."""

    def total(self) -> int:
        """All there is."""

    def used(self) -> int:
        """What is in use by anybody, less what could be given back at once."""

    def peak_of(self, run: Callable[[], None]) -> int:
        """The most that `run` has in use beyond what is in use before."""


class GpuMemory:
    """The current GPU's."""

    def total(self) -> int:
        """See `DeviceMemory.total`."""
        return torch.cuda.mem_get_info()[1]

    def used(self) -> int:
        """See `DeviceMemory.used`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def peak_of(self, run: Callable[[], None]) -> int:
        """See `DeviceMemory.peak_of`."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Who has what of a device's memory, in bytes."""

    total: int
    used: int
    iteration: int
    transfers: int
    graphs: int

    def kv_memory(self, fraction: float) -> int:
        """What is left of that fraction of the whole.

        Raises:
            NoMemoryLeft: nothing.
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
    """What hidden states take that are on their way, beside those of the iteration that is run.

    Those of one iteration are `hidden_bytes`. As many iterations are in flight as the scheduler
    allows where nothing else is set: one for each stage, and two at least. A rank makes room for
    all that have been announced, and keeps what it has sent until that has arrived.
    """
    n_others = max(n_stages, 2) - 1
    n_received = n_others if stage_index > 0 else 0
    n_sent = min(n_others, max_pending_sends) if stage_index + 1 < n_stages else 0
    return (n_received + n_sent) * hidden_bytes


def measure(
    memory: DeviceMemory, iteration: Callable[[], None], *, transfers: int, graphs: int
) -> MemoryShares:
    """The shares when all but K/V is loaded; `iteration` is run twice, since the first one also
    compiles and allocates what stays."""
    iteration()
    peak = memory.peak_of(iteration)
    return MemoryShares(memory.total(), memory.used(), peak, transfers, graphs)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.2f} GiB"
