"""The command that probes run, as they run it: its exit status is what they go by."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common import rpc
from services.common.health import LIVENESS, READINESS, Health
from tests.environments import PROXIES
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
API = "orcinus.v1.TestService"


@contextlib.asynccontextmanager
async def healthy_process(at: str = "127.0.0.1:0") -> AsyncIterator[tuple[Health, str]]:
    """Something that tells its health, and where."""
    health = Health(API)
    await health.start()
    server = rpc.create_server()
    health.add_to(server)
    address = rpc.bind(server, at)
    await server.start()
    yield health, address
    await server.stop(grace=0)


async def run(*arguments: str) -> tuple[int | None, str]:
    """Exit status and standard error of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.common.healthcheck", *arguments),
        cwd=ROOT,
        env={**os.environ, **PROXIES, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), HANG_S)
    return process.returncode, stderr.decode()


async def test_it_exits_with_0_and_in_silence_while_the_service_is_serving() -> None:
    async with healthy_process() as (health, address):
        await health.set_ready(True)
        assert await run(address, READINESS) == (0, "")


async def test_it_finds_a_process_that_listens_by_ipv6_alone() -> None:
    async with healthy_process("[::1]:0") as (health, address):
        await health.set_ready(True)
        assert await run(f"localhost:{address.rpartition(':')[2]}", READINESS) == (0, "")


@pytest.mark.thorough
async def test_each_service_is_asked_for_by_its_name() -> None:
    async with healthy_process() as (_, address):
        alive, ready = await asyncio.gather(run(address, LIVENESS), run(address, READINESS))
    assert alive == (0, "")
    assert ready == (1, f"readiness at {address}: NOT_SERVING\n")


async def test_a_name_nobody_knows_is_not_healthy() -> None:
    async with healthy_process() as (_, address):
        status, reason = await run(address, "nonsense")
    assert status == 1
    assert reason.startswith(f"nonsense at {address}: NOT_FOUND")


async def test_nobody_there_is_not_healthy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        status, reason = await run(f"127.0.0.1:{taken.getsockname()[1]}", LIVENESS)
    assert status == 1
    assert "UNAVAILABLE" in reason
    assert reason.count("\n") == 1


async def test_a_process_that_does_not_answer_is_not_healthy_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        status, reason = await run(address, LIVENESS, "--timeout", "0.2")
    assert status == 1
    assert "DEADLINE_EXCEEDED" in reason


async def test_it_imports_nothing_heavy() -> None:
    """It starts every few seconds in each pod; settings alone would double its cost."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c"),
        "import sys, services.common.healthcheck; print(*sys.modules)",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await asyncio.wait_for(process.communicate(), HANG_S)
    modules = set(stdout.decode().split())
    assert modules.isdisjoint({"pydantic", "uvloop", "orcinus", "kubernetes", "torch", "numpy"})
    own = {name for name in modules if name.startswith("services.")}
    assert own == {"services.common", "services.common.healthcheck"}


@pytest.mark.parametrize("arguments", [[], ["127.0.0.1:1"]], ids=["nothing", "no service"])
async def test_a_wrong_command_line_is_not_healthy(arguments: list[str]) -> None:
    status, reason = await run(*arguments)
    assert status not in (0, None)
    assert "usage:" in reason
