"""Starts services as processes with their own addresses on the loopback device, as pods have, and a
fake Kubernetes API that lists the workers. `WorkerDeployment` starts and stops workers as a
Deployment does."""

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
    """Starts the processes of a system, and has the fake API that lists the pods of its workers."""

    api: FakeKubernetes
    kubeconfig: Path
    processes: contextlib.AsyncExitStack
    model: Path = DEMO
    port: str = field(default_factory=lambda: free_address().rpartition(":")[2])
    scheduler: str = field(default_factory=free_address)
    scheduler_metrics: str = field(default_factory=free_address)
    http: str = field(default_factory=free_address)

    async def start(self, module: str, **settings: object) -> Process:
        """Starts the service `module` with these settings."""
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
        """Starts a worker at its own address, and adds its pod to the API."""
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
        """Returns the frontend's response to a GET request, or None if the frontend does not
        answer."""
        with contextlib.suppress(httpx.TransportError):
            async with self.client() as client:
                return await client.get(path)
        return None

    def client(self) -> httpx.AsyncClient:
        """Returns an HTTP client of the frontend."""
        return httpx.AsyncClient(base_url=f"http://{self.http}", trust_env=False, timeout=HANG_S)

    async def until_reason(self, *parts: str) -> str:
        """Waits until the frontend reports a reason for not serving that contains all of `parts`,
        and returns the reason."""
        async with asyncio.timeout(HANG_S):
            while True:
                answer = await self.get("/serving")
                reason = "" if answer is None else answer.json().get("reason", "")
                if all(part in reason for part in parts):
                    return str(reason)
                await asyncio.sleep(0.1)

    async def until_serving(self) -> None:
        """Waits until the frontend reports that it serves."""
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
        """Starts and stops workers whenever the scale changes, until cancelled."""
        while True:
            self._has_changed.clear()
            while self.n_workers < (self._pods.api.n_replicas or 0):
                number, self._next = self._next, self._next + 1
                self._workers[number] = await self._pods.start_worker(number, **self._settings)
            while self.n_workers > (self._pods.api.n_replicas or 0):
                await self._stop(max(self._workers))
            await self._has_changed.wait()

    async def _stop(self, number: int) -> None:
        """Ends a worker in the order in which Kubernetes does: the pod is marked as terminating,
        the process ends, and the pod is removed."""
        process, name = self._workers.pop(number), f"worker-{number}"
        self._pods.api.set_pod(name, ip=f"127.0.0.{number}", deleted="2026-11-20T11:00:00Z")
        process.terminate()
        await asyncio.wait_for(process.wait(), HANG_S)
        self._pods.api.delete_pod(name)


async def end(process: Process) -> None:
    """Kills a process if it still runs, and waits for its end."""
    if process.returncode is None:
        process.kill()
    await process.wait()


@contextlib.asynccontextmanager
async def pods(directory: Path, *, model: Path = DEMO) -> AsyncIterator[Pods]:
    """Yields an object with a fake API and no processes. At the end, kills the processes that were
    started."""
    async with fake_kubernetes() as api, contextlib.AsyncExitStack() as processes:
        yield Pods(api, write_kubeconfig(api, directory), processes, model)
