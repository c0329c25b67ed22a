"""A whole local system as a process of its own, started as users start it."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from benchmarks.machine import ROOT

METRICS = re.compile(r"Metrics of (.*): (http://\S+)")
READY = re.compile(r"Orcinus serves (\S+) .* OpenAI (http://\S+)/v1  gRPC (\S+)")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class System:
    """A running local system: its addresses, its model and its process."""

    model: str
    http: str
    """URL of the OpenAI API without a path, as `http://host:port`."""
    grpc: str
    pid: int
    metrics: dict[str, str]
    """URL of each service's metrics, by the name of the service; empty without `--metrics`."""


@contextlib.asynccontextmanager
async def running(
    arguments: Sequence[str], *, module: str = "services.local"
) -> AsyncIterator[System]:
    """Starts `python -m module` with `arguments` on free ports, and yields the system. At the end
    of the context, ends the process with all its descendants.

    Raises:
        RuntimeError: the system ended, or did not serve in time; standard error has the reason.
    """
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            module,
            "--http-port=0",
            "--grpc-port=0",
            "--fail-fast",
            *arguments,
        ),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield await _wait_ready(process)
    finally:
        await _stop(process)


async def _wait_ready(process: asyncio.subprocess.Process) -> System:
    assert process.stdout is not None
    metrics = {}
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            async for line in process.stdout:
                if found := METRICS.match(line.decode()):
                    metrics[found[1]] = found[2]
                if found := READY.match(line.decode()):
                    return System(found[1], found[2], found[3], process.pid, metrics)
    except TimeoutError:
        raise RuntimeError(f"does not serve after {START_TIMEOUT_S:g} s") from None
    raise RuntimeError(f"ended with status {await process.wait()} before it served")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
