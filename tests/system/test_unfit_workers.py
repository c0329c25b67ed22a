"""Real workers, a real scheduler and a real frontend: a worker with another block size comes first,
is named, and stays out."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.addresses import free_address
from tests.exposition import Samples
from tests.fake_kubernetes import NAMESPACE, FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.limits import HANG_S

pytestmark = [pytest.mark.system, pytest.mark.thorough]

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
LIMIT_S = 120.0


@dataclass
class Cluster:
    """Processes with addresses of their own on the loopback device, like pods."""

    api: FakeKubernetes
    kubeconfig: Path
    processes: contextlib.AsyncExitStack
    port: str = field(default_factory=lambda: free_address().rpartition(":")[2])
    scheduler: str = field(default_factory=free_address)
    scheduler_metrics: str = field(default_factory=free_address)
    http: str = field(default_factory=free_address)

    async def start(self, module: str, **settings: object) -> Process:
        path = os.pathsep.join((str(ROOT), str(ROOT / "protos/gen")))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", module),
            env={**os.environ, "PYTHONPATH": path, "KUBECONFIG": str(self.kubeconfig)}
            | {f"ORCINUS_{name.upper()}": str(value) for name, value in settings.items()},
        )
        self.processes.push_async_callback(_end, process)
        return process

    async def start_worker(self, number: int, *, block_size: int) -> Process:
        host = f"127.0.0.{number}"
        process = await self.start(
            "services.worker",
            model=DEMO,
            address=f"{host}:{self.port}",
            data_host=host,
            block_size=block_size,
            kv_memory="4MiB",
            n_threads=1,
        )
        self.api.set_pod(f"worker-{number}", ip=host)
        return process

    async def serving(self) -> httpx.Response | None:
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=f"http://{self.http}", trust_env=False) as client:
                return await client.get("/serving", timeout=HANG_S)
        return None

    async def until_reason(self, *parts: str) -> str:
        """Waits until the frontend says that nothing is served, for a reason with all parts."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                answer = await self.serving()
                reason = "" if answer is None else answer.json().get("reason", "")
                if all(part in reason for part in parts):
                    return str(reason)
                await asyncio.sleep(0.1)

    async def until_serving(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (answer := await self.serving()) is None or answer.status_code != 200:
                await asyncio.sleep(0.1)

    async def unfit(self) -> dict[str, str]:
        """What each worker that does not fit says, by the number of its pod's address."""
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{self.scheduler_metrics}/metrics")).text
        labels = Samples(text).labels("orcinus_unfit_worker")
        return {one["worker"].rpartition(":")[0]: one["says"] for one in labels}


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with fake_kubernetes() as api, contextlib.AsyncExitStack() as processes:
        made = Cluster(api, write_kubeconfig(api, tmp_path), processes)
        await made.start(
            "services.scheduler",
            address=made.scheduler,
            metrics_address=made.scheduler_metrics,
            n_stages=2,
            namespace=NAMESPACE,
            worker_selector="app=worker",
            worker_port=made.port,
        )
        await made.start(
            "services.frontend",
            model=DEMO,
            http_address=made.http,
            grpc_address="127.0.0.1:0",
            scheduler=made.scheduler,
        )
        yield made


async def test_two_good_workers_serve_whoever_came_first_and_the_odd_one_is_named(
    cluster: Cluster,
) -> None:
    odd = await cluster.start_worker(11, block_size=32)
    await cluster.until_reason("there is no worker for stage 1")
    await cluster.start_worker(12, block_size=16)
    reason = await cluster.until_reason("block_size 16, not 32", "block_size 32, not 16")
    assert "127.0.0." not in reason
    await cluster.start_worker(13, block_size=16)
    await cluster.until_serving()
    assert list((await cluster.unfit()).values()) == ["block_size 32, not 16"]
    odd.kill()  # it comes back right after the restart
    await odd.wait()
    await cluster.start_worker(11, block_size=32)
    await cluster.until_serving()
