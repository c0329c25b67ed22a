"""The return of memory that is no longer used."""

import asyncio
import contextlib
import ctypes
import sys

import pytest

from services.common.resident_memory import GROWTH_BYTES, give_back_memory, resident_bytes
from tests.limits import HANG_S

BLOCK_BYTES = 4096
N_BLOCKS = 3 * GROWTH_BYTES // BLOCK_BYTES

LIBRARY = ctypes.CDLL(None)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(LIBRARY, "malloc_trim"), reason="not glibc"
)


async def test_what_has_been_freed_is_given_back() -> None:
    LIBRARY.malloc.restype = ctypes.c_void_p
    LIBRARY.free.argtypes = [ctypes.c_void_p]
    giving = asyncio.create_task(give_back_memory())
    await asyncio.sleep(0)
    before = resident_bytes()
    blocks = [LIBRARY.malloc(BLOCK_BYTES) for _ in range(N_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last one holds all below it where it is
        LIBRARY.free(block)
    assert resident_bytes() > before + 2 * GROWTH_BYTES
    async with asyncio.timeout(HANG_S):
        while resident_bytes() > before + GROWTH_BYTES:
            await asyncio.sleep(0.05)
    giving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await giving
    LIBRARY.free(blocks[-1])
