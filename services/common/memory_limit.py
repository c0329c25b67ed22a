"""Finds the memory limit of this process's container, and checks whether a service's settings fit
into it.

A service that may need more memory than its limit would run well until the requests of some client
need that much. Then the kernel would kill the service, and the requests of all clients would fail.
So a service with such settings does not start.
"""

from collections.abc import Mapping
from pathlib import Path

from services.common.cgroups import CGROUPS, MEMBERSHIP, groups_of

MIB = 2**20
PROCESS = "the process itself"
"""Name, in messages, of the memory that a service needs whatever its settings are."""


def memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Returns the lowest memory limit of this process's control groups in bytes, or None if there
    is no limit. `groups_of` explains the arguments."""
    limits = [
        int(limit)
        for group in groups_of("memory", cgroups=cgroups, membership=membership)
        for name in ("memory.max", "memory.limit_in_bytes")  # versions 2 and 1
        if (group / name).is_file() and (limit := (group / name).read_text().strip()) != "max"
    ]
    return min(limits, default=None)


def trouble_of(parts: Mapping[str, int], limit: int | None) -> str:
    """Returns a text which says that a service may need more memory than `limit`, and how much of
    this memory each setting may need, the largest part first.

    Returns an empty text if the memory is enough or has no limit. `parts` has a number of bytes for
    each setting, and also for `PROCESS`, the memory that depends on no setting.
    """
    needed = sum(parts.values())
    if limit is None or needed <= limit:
        return ""
    by_size = sorted(set(parts) - {PROCESS}, key=lambda name: -parts[name])
    settings = ", ".join(f"{name} ({_mib(parts[name])})" for name in by_size)
    return (
        f"with these settings it may need {_mib(needed)} of memory, and its limit is "
        f"{_mib(limit)}: raise that, or lower {settings}; the rest is {PROCESS}"
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.0f} MiB"
