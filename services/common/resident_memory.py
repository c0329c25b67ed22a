"""The memory that this process has, and the return of what it no longer uses.

glibc keeps what has been freed, in an arena for each of many threads: after a flood over gRPC,
whose threads come and go, that was twenty times what was in use, for ever. Other libraries of C,
and other systems, keep less, and are left alone.
"""

import asyncio
import ctypes
import os
import sys
from pathlib import Path

M_ARENA_MAX = -8  # malloc.h

N_ARENAS = 2
"""Arenas of the allocator; it would make eight for each processor."""

GROWTH_BYTES = 48 * 2**20
"""Growth after which memory is given back."""

PERIOD_S = 0.5
"""Seconds between two looks at it."""

USED_S = 4.0
"""Seconds between them when nearly all of the memory is in use."""

MAX_PART = 0.05
"""Part of the time in which memory may be given back; other threads wait for memory meanwhile."""

STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Returns the resident memory of this process; 0 where the system does not tell."""
    try:
        return int(STATM.read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def limit_arenas() -> None:
    """Has the allocator make few arenas; comes before there are threads."""
    if (library := _glibc()) is not None:
        library.mallopt(M_ARENA_MAX, N_ARENAS)


async def give_back_memory() -> None:
    """Gives memory back while there is much more than at the least, until cancelled."""
    library = _glibc()
    if library is None:
        return
    loop, least, wait_s = asyncio.get_running_loop(), resident_bytes(), PERIOD_S
    while True:
        await asyncio.sleep(wait_s)
        before, start_s = resident_bytes(), loop.time()
        least, wait_s = min(least, before), PERIOD_S
        if before > least + GROWTH_BYTES:
            await asyncio.to_thread(library.malloc_trim, 0)
            wait_s = max(PERIOD_S, (loop.time() - start_s) / MAX_PART)
            if before - resident_bytes() < GROWTH_BYTES / 4:
                wait_s = max(wait_s, USED_S)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
