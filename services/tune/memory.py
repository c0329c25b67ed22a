"""Computes how much of this machine's memory the keys and values may take."""

from pathlib import Path

from services.common.cgroups import CGROUPS
from services.common.memory_limit import MIB, memory_limit

MEMINFO = Path("/proc/meminfo")
PROCESS_BYTES = 600 * MIB
"""Estimated bytes of memory of a rank without its weights, including the buffers of an
iteration."""
N_OTHERS = 2
"""Number of processes other than ranks and controllers. Each is assumed to take as much memory as a
rank without weights, which is more than it really takes."""
SHARE = 0.5
"""Keys and values may take this fraction of the memory that weights and processes leave free."""
STEP_BYTES = 64 * MIB


def available_bytes(*, meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> int:
    """Returns the number of bytes that further processes may take: the memory available on the
    machine, or the limit of the container if that is less."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = memory_limit(cgroups)
    return available if limit is None else min(available, limit)


def kv_bytes(n_available: int, *, n_weight_bytes: int, n_ranks: int) -> int:
    """Returns the number of bytes that the keys and values of all ranks together may take, at least
    `STEP_BYTES`. `n_available` is the number of bytes that all processes may take."""
    n_left = n_available - n_weight_bytes - (n_ranks + N_OTHERS) * PROCESS_BYTES
    return max(STEP_BYTES, int(SHARE * n_left))


def rounded(n_bytes: float) -> int:
    """Rounds a number of bytes up to a multiple of `STEP_BYTES`, so that the setting is a round
    number."""
    return -int(-n_bytes // STEP_BYTES) * STEP_BYTES
