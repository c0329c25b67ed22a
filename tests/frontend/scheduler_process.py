"""A fake scheduler in a process of its own. The process can be stopped so that it behaves like a
lost machine: its connections stay open, and it does not answer."""

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
    """The process and its address."""
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
    """Returns the options with a twentieth of the times to wait for a peer that does not answer."""
    times = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")
    return [(name, int(value) // 20 if name.endswith(times) else value) for name, value in options]
