"""A fake scheduler in a process of its own. A test can stop the process (SIGSTOP), so that it
behaves like a lost machine: its connections stay open, and it does not answer."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.common import rpc

ROOT = Path(__file__).parents[2]

CODE = """
import asyncio
from tests.fake_scheduler import FakeScheduler

async def serve():
    print(await FakeScheduler().start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""

START_S = 60.0
"""Timeout in seconds for the process to start, which imports many modules first."""


@asynccontextmanager
async def scheduler_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Yields the process and the address of the scheduler, and kills the process at the end."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "protos/gen")))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CODE,
        env={**os.environ, "PYTHONPATH": path},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            address = await process.stdout.readline()
        yield process, address.decode().strip()
    finally:
        process.kill()
        await process.communicate()


def hurried(options: rpc.Options) -> list[tuple[str, str | int]]:
    """Returns the gRPC options with all timeouts for a silent peer divided by 20."""
    times = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")
    return [(name, int(value) // 20 if name.endswith(times) else value) for name, value in options]
