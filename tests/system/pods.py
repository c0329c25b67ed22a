"""Processes with addresses of their own on the loopback device, like pods, and a fake Kubernetes
API that knows them. It can play a Deployment, which starts and stops workers as its scale says."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.addresses import free_address
from tests.exposition import Samples
from tests.fake_kubernetes import NAMESPACE, FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"


@dataclass
class Pods:
    """The processes by their roles, and the API that lists the pods of the workers."""

    api: FakeKubernetes
    kubeconfig: Path
    processes: contextlib.AsyncExitStack
    model: Path = DEMO
    port: str = field(default_factory=lambda: free_address().rpartition(":")[2])
    scheduler: str = field(default_factory=free_address)
    scheduler_metrics: str = field(default_factory=free_address)
    http: str = field(default_factory=free_address)

    async def start(self, module: str, **settings: object) -> Process:
        """Starts a service with its settings."""
        path = os.pathsep.join((str(ROOT), str(ROOT / "protos/gen")))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", module),
            env={**os.environ, "PYTHONPATH": path, "KUBECONFIG": str(self.kubeconfig)}
            | {f"ORCINUS_{name.upper()}": str(value) for name, value in settings.items()},
        )
        self.processes.push_async_callback(end, process)
        return process

    async def start_worker(self, number: int, **settings: object) -> Process:
        """Starts a worker at an address of its own, and makes its pod known."""
        host = f"127.0.0.{number}"
        process = await self.start(
            "services.worker",
            model=self.model,
            address=f"{host}:{self.port}",
            data_host=host,
            kv_memory="4MiB",
            n_threads=1,
            **settings,
        )
        self.api.set_pod(f"worker-{number}", ip=host)
        return process

    async def start_scheduler(self, **settings: object) -> Process:
        """Starts the scheduler."""
        return await self.start(
            "services.scheduler",
            address=self.scheduler,
            metrics_address=self.scheduler_metrics,
            namespace=NAMESPACE,
            worker_selector="app=worker",
            worker_port=self.port,
            **settings,
        )

    async def start_frontend(self, **settings: object) -> Process:
        """Starts a frontend."""
        return await self.start(
            "services.frontend",
            model=self.model,
            http_address=self.http,
            grpc_address="127.0.0.1:0",
            scheduler=self.scheduler,
            **settings,
        )

    async def get(self, path: str) -> httpx.Response | None:
        """Returns the frontend's answer; None if there is none."""
        with contextlib.suppress(httpx.TransportError):
            async with self.client() as client:
                return await client.get(path)
        return None

    def client(self) -> httpx.AsyncClient:
        """Returns a client of the frontend."""
        return httpx.AsyncClient(base_url=f"http://{self.http}", trust_env=False, timeout=HANG_S)

    async def until_reason(self, *parts: str) -> str:
        """Waits until the frontend reports that nothing is served, with a reason that contains all
        of `parts`."""
        async with asyncio.timeout(HANG_S):
            while True:
                answer = await self.get("/serving")
                reason = "" if answer is None else answer.json().get("reason", "")
                if all(part in reason for part in parts):
                    return str(reason)
                await asyncio.sleep(0.1)

    async def until_serving(self) -> None:
        """Waits until requests get tokens."""
        async with asyncio.timeout(HANG_S):
            while (answer := await self.get("/serving")) is None or answer.status_code != 200:
                await asyncio.sleep(0.1)

    async def metrics(self) -> Samples:
        """Returns the metrics of the scheduler."""
        async with httpx.AsyncClient(trust_env=False) as client:
            return Samples((await client.get(f"http://{self.scheduler_metrics}/metrics")).text)


class WorkerDeployment:
    """Starts and stops workers so that their number is the scale of the API's Deployment."""

    def __init__(self, pods: Pods, **settings: Any) -> None:
        """`settings` are the settings of each worker."""
        self._pods = pods
        self._settings = settings
        self._workers: dict[int, Process] = {}
        self._next = 21
        self._has_changed = asyncio.Event()
        pods.api.on_scale = lambda _: self._has_changed.set()

    @property
    def n_workers(self) -> int:
        """Number of workers that run."""
        return len(self._workers)

    @property
    def hosts(self) -> list[str]:
        """Addresses of the workers that run."""
        return [f"127.0.0.{number}" for number in self._workers]

    async def run(self) -> None:
        """Follows the scale until cancelled."""
        while True:
            self._has_changed.clear()
            while self.n_workers < (self._pods.api.n_replicas or 0):
                number, self._next = self._next, self._next + 1
                self._workers[number] = await self._pods.start_worker(number, **self._settings)
            while self.n_workers > (self._pods.api.n_replicas or 0):
                await self._stop(max(self._workers))
            await self._has_changed.wait()

    async def _stop(self, number: int) -> None:
        """Ends a worker as Kubernetes does: its pod terminates, then the process, then the pod is
        gone."""
        process, name = self._workers.pop(number), f"worker-{number}"
        self._pods.api.set_pod(name, ip=f"127.0.0.{number}", deleted="2026-11-20T11:00:00Z")
        process.terminate()
        await asyncio.wait_for(process.wait(), HANG_S)
        self._pods.api.delete_pod(name)


async def end(process: Process) -> None:
    """Ends a process at once, if it still runs."""
    if process.returncode is None:
        process.kill()
    await process.wait()


@contextlib.asynccontextmanager
async def pods(directory: Path, *, model: Path = DEMO) -> AsyncIterator[Pods]:
    """Yields the API, without any process; ends the processes after the block."""
    async with fake_kubernetes() as api, contextlib.AsyncExitStack() as processes:
        yield Pods(api, write_kubeconfig(api, directory), processes, model)
