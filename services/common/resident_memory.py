"""Limits the resident memory of this process by returning unused memory to the system.

glibc keeps freed memory in arenas, and many threads have an arena of their own. After a flood of
gRPC calls, whose threads come and go, glibc kept twenty times the memory in use, and never returned
it. Other C libraries and other systems keep less; this module does nothing there.
"""

import asyncio
import ctypes
import os
import sys
from pathlib import Path

M_ARENA_MAX = -8  # malloc.h

N_ARENAS = 2
"""Number of memory arenas of the allocator. By default glibc creates eight for each processor."""

GROWTH_BYTES = 48 * 2**20
"""Growth of the resident memory, in bytes, after which unused memory is returned to the system."""

PERIOD_S = 0.5
"""Seconds between two checks of the resident memory."""

USED_S = 4.0
"""Seconds between two checks of the resident memory while nearly all of it is in use."""

MAX_PART = 0.05
"""Largest fraction of the time that may be spent on returning memory to the system. Other threads
cannot allocate meanwhile."""

STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes. Returns 0 if the system does not
    report it."""
    try:
        return int(STATM.read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def limit_arenas() -> None:
    """Limits the number of the allocator's arenas. Must be called before the process starts
    threads."""
    if (library := _glibc()) is not None:
        library.mallopt(M_ARENA_MAX, N_ARENAS)


async def give_back_memory() -> None:
    """Returns unused memory to the system whenever the resident memory has grown by `GROWTH_BYTES`
    above its lowest value. Runs until cancelled. Without glibc, returns at once."""
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
