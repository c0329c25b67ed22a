"""Computes the number of CPUs that a process may use.

In a container this number is often smaller than the number of processors of the machine: the
scheduler affinity names the usable processors, and the quota of a control group limits the time on
them. If there were a compute thread for each core of the machine, the kernel would throttle some
threads in the middle of their work, and the other threads would wait for the throttled ones.
"""

import os
from pathlib import Path

from services.common.cgroups import CGROUPS, MEMBERSHIP, groups_of


def usable_cpus(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns the number of CPUs that this process may use, at least 1. The number is the size of
    the process's affinity, or the lowest quota of its control groups if that is smaller.

    A quota that is not a whole number is rounded down, because one thread too many would be
    throttled and make all others wait. `groups_of` explains the arguments.
    """
    groups = groups_of("cpu", cgroups=cgroups, membership=membership)
    quotas = [quota for group in groups if (quota := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _quota(group: Path) -> float | None:
    """Returns the CPU time that a control group may use, as a number of CPUs. Returns None if the
    group has no limit."""
    unified = group / "cpu.max"  # version 2: "max 100000" or "150000 100000", in microseconds
    if unified.is_file():
        quota, period = unified.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    limits = [group / f"cpu.cfs_{name}_us" for name in ("quota", "period")]  # version 1
    if not all(path.is_file() for path in limits):
        return None
    quota_us, period_us = (int(path.read_text()) for path in limits)
    return quota_us / period_us if quota_us > 0 else None
