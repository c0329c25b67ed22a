"""The number of this machine's processors that a process may use.

In a container this number is often smaller than the number of processors of the machine: the
scheduler affinity names the usable processors, and the cgroup's quota limits the time on them. With
a compute thread for each core of the machine, the kernel would throttle some threads in the middle
of their work, and the other threads would wait for these.
"""

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus(cgroups: Path = CGROUPS) -> int:
    """Returns the number of CPUs in this process's affinity, or the cgroup's quota in CPUs if that
    is smaller; at least 1.

    A quota that is no whole number is rounded up. `cgroups` is the directory at which this
    container's cgroups are mounted.
    """
    n_cpus = len(os.sched_getaffinity(0))
    quota = _quota(cgroups)
    return n_cpus if quota is None else max(1, min(n_cpus, math.ceil(quota)))


def _quota(cgroups: Path) -> float | None:
    """Returns the CPU time that the cgroup may use, in CPUs; None without a limit."""
    unified = cgroups / "cpu.max"  # version 2: "max 100000" or "150000 100000", in microseconds
    if unified.is_file():
        quota, period = unified.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    limits = [cgroups / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]  # version 1
    if not all(path.is_file() for path in limits):
        return None
    quota_us, period_us = (int(path.read_text()) for path in limits)
    return quota_us / period_us if quota_us > 0 else None
