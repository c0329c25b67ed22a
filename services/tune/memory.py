"""The memory of this machine that may be had for keys and values."""

from pathlib import Path

from services.common.cpus import CGROUPS
from services.common.memory_limit import MIB, memory_limit

MEMINFO = Path("/proc/meminfo")
PROCESS_BYTES = 600 * MIB
"""Memory of a rank beside its weights, with what an iteration takes."""
N_OTHERS = 2
"""Processes beside ranks and controllers that take as much as a rank: rather too many."""
SHARE = 0.5
"""Part of the memory that is left which keys and values may take."""
STEP_BYTES = 64 * MIB


def available_bytes(*, meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> int:
    """Returns the bytes that processes may still take, on the machine and in its container."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = memory_limit(cgroups)
    return available if limit is None else min(available, limit)


def kv_bytes(n_available: int, *, n_weight_bytes: int, n_ranks: int) -> int:
    """Returns the bytes that keys and values of all ranks may take together; at least a little."""
    n_left = n_available - n_weight_bytes - (n_ranks + N_OTHERS) * PROCESS_BYTES
    return max(STEP_BYTES, int(SHARE * n_left))


def rounded(n_bytes: float) -> int:
    """Returns bytes rounded up to what people write into settings."""
    return -int(-n_bytes // STEP_BYTES) * STEP_BYTES
