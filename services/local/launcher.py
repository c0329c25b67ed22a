"""Starts the services of a local system, and stops them in reverse order.

The workers start first, then the scheduler, which needs their addresses, and then the frontend,
which needs the scheduler's address. A service reports its address before it is ready, so that the
services load side by side. Once all of them serve, a service that dies or hangs is started again.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from services.common.address import Address, loopback, parse, reachable
from services.common.cpus import usable_cpus
from services.local.child import STOP_TIMEOUT_S, Child, OnMessage
from services.local.settings import LocalSettings
from services.local.supervisor import RestartLimit, Supervisor

DRAIN_S = 5
"""Seconds for running requests to finish when the scheduler is stopped.

The value is below the timeout after which `Child.stop` kills a service. The frontend's own setting
is set to that timeout.
"""
OnProgress = Callable[[int, int, int], None]
"""A function of a worker's index, its loaded bytes and its total bytes."""


@dataclass(frozen=True, slots=True)
class LocalAddresses:
    """The addresses of the frontend's APIs and of the services' metrics, as host:port, and
    properties of the served model."""

    http: str
    grpc: str
    metrics: dict[str, str]
    """Addresses of the services' metrics, by the services' names; empty without metrics."""
    can_chat: bool = False
    """Whether the model has a chat template, so that the API answers conversations."""
    report: Sequence[tuple[str, str]] = ()
    """How the checkpoint was understood: the rows of a CheckpointReport."""


class Launcher:
    """The process tree of a local system: workers, scheduler and frontend. It leaves no process
    behind."""

    worker_module = "services.worker"  # benchmarks override these two modules
    scheduler_module = "services.scheduler"

    def __init__(self, settings: LocalSettings) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future that is done when a service has ended and is not restarted.

        Its result is the reason why the service ended.
        """
        self._settings = settings
        self._host = loopback()  # where services listen for one another
        self._free_address = str(Address(self._host, 0))
        self._waves: list[list[Supervisor]] = []  # each wave starts and stops together

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for wave in reversed(self._waves):
            await asyncio.gather(*(service.stop() for service in wave))

    async def start(self, on_progress: OnProgress) -> LocalAddresses:
        """Starts all services, waits until they serve, and returns the addresses.

        Raises:
            ChildDied: a service ended before. `death` has the reason.
        """
        self._waves = [[], [], []]
        workers = [
            await self._start_worker(index, on_progress)
            for index in range(self._settings.n_workers)
        ]
        addresses = [await worker.wait_for("address") for worker in workers]
        scheduler = await self._start_scheduler(addresses)
        frontend = await self._start_frontend(await scheduler.wait_for("address"))
        await asyncio.gather(
            *(child.wait_for("ready") for child in (*workers, scheduler)),
            frontend.wait_for("http"),
        )
        for service in (service for wave in self._waves for service in wave):
            service.restarts = not self._settings.fail_fast
        metrics = {
            child.name: child.said["metrics"]
            for child in (*workers, scheduler, frontend)
            if child.said["metrics"] is not None
        }
        http, grpc = (str(reachable(parse(frontend.said[api]))) for api in ("http", "grpc"))
        report = [(name, text) for name, text in workers[0].said.get("checkpoint", [])]
        return LocalAddresses(http, grpc, metrics, frontend.said["can_chat"], report)

    async def _start(
        self,
        wave: int,
        name: str,
        module: str,
        options: dict[str, object],
        *,
        ready_key: str = "ready",
        on_message: OnMessage = lambda _: None,
    ) -> Child:
        """Starts a service that belongs to a wave: the services of a wave start together.
        `ready_key` is the key that the service reports when it is ready."""
        service = Supervisor(
            name,
            module,
            {
                **options,
                "metrics-address": self._free_address if self._settings.metrics else None,
                "log-level": self._settings.log_level,
            },
            ready_key=ready_key,
            on_message=on_message,
            tell=_complain,
            give_up=self._note_death,
            limit=RestartLimit(),
        )
        child = await service.start()
        self._waves[wave].append(service)
        return child

    def _note_death(self, reason: str) -> None:
        if not self.death.done():
            self.death.set_result(reason)

    async def _start_worker(self, index: int, on_progress: OnProgress) -> Child:
        name = f"stage {index}" if self._has_fixed_stages else f"worker {index}"
        return await self._start(
            0,
            name,
            self.worker_module,
            self.worker_options(index),
            on_message=partial(_follow_loading, index, on_progress),
        )

    def worker_options(self, index: int) -> dict[str, object]:
        """Returns the settings of a worker, keyed by option of its command line."""
        settings = self._settings
        n_threads, cpus = share_cpus(settings, usable_cpus(), sorted(os.sched_getaffinity(0)))
        return {
            "model": settings.model,
            "address": self._free_address,
            "data-host": self._host,
            "stage-index": index if self._has_fixed_stages else None,
            "n-stages": settings.stages if self._has_fixed_stages else None,
            "tp-size": settings.tp,
            "load-format": settings.load_format,
            "dtype": settings.dtype,
            "quantization": settings.quantization,
            "max-model-len": settings.max_model_len,
            "kv-memory": settings.kv_memory,
            "transfer-timeout-s": settings.iteration_limit_s,
            "profile-dir": settings.profile_dir,
            "n-threads": n_threads,
            "cpus": ",".join(str(cpu) for cpu in cpus[index]) if cpus else None,
            **dict(settings.worker),
        }

    @property
    def _has_fixed_stages(self) -> bool:
        """Whether each worker is told its stage at start. With several pipelines the scheduler
        assigns the stages: after a loss, a worker may have to take the stage of another one."""
        return self._settings.pipelines == 1

    async def _start_scheduler(self, workers: list[str]) -> Child:
        options = self.scheduler_options(workers)
        return await self._start(1, "scheduler", self.scheduler_module, options)

    def scheduler_options(self, workers: list[str]) -> dict[str, object]:
        """Returns the settings of the scheduler, keyed by option of its command line.

        `workers` are the addresses of the workers. With one pipeline, they are in the order of its
        stages.
        """
        settings = self._settings
        return {
            "address": self._free_address,
            "stages": ",".join(workers),
            "n-stages": settings.stages,
            "max-batch-size": settings.max_batch_size,
            "max-batch-tokens": settings.max_batch_tokens,
            "policy": settings.policy,
            "pipeline-depth": settings.pipeline_depth,
            "prefix-cache": settings.prefix_cache,
            "max-requests": settings.max_requests,
            "iteration-limit-s": settings.iteration_limit_s,
            "traced-iterations-per-s": settings.traced_iterations_per_s,
            "drain-s": DRAIN_S,
            **dict(settings.scheduler),
        }

    async def _start_frontend(self, scheduler: str) -> Child:
        options = self.frontend_options(scheduler)
        return await self._start(2, "frontend", "services.frontend", options, ready_key="http")

    def frontend_options(self, scheduler: str) -> dict[str, object]:
        """Returns the settings of the frontend, keyed by option of its command line.

        `scheduler` is the address of the scheduler.
        """
        settings = self._settings
        return {
            "model": settings.model,
            "served-model-name": ",".join(settings.served_model_name) or None,
            "scheduler": scheduler,
            "http-address": str(Address(settings.host, settings.http_port)),
            "grpc-address": str(Address(settings.host, settings.grpc_port)),
            "api-keys-file": settings.api_keys_file,
            "public-tls-dir": settings.tls_dir,
            "page": settings.page,
            "drain-s": STOP_TIMEOUT_S,
            # With `fail_fast` a lost pipeline does not come back, so requests do not wait for it.
            **({"hold-s": 0, "resume-s": 0} if settings.fail_fast else {}),
            **dict(settings.frontend),
        }


def share_cpus(
    settings: LocalSettings, n_usable: int, cpus: Sequence[int]
) -> tuple[int, list[list[int]]]:
    """Returns the number of compute threads of each rank, and the CPUs of each worker's threads.

    Each thread is bound to a CPU only if the threads of all ranks use all CPUs. Otherwise the list
    of CPUs is empty, since another system on this machine would choose equal CPUs. `n_usable` is
    the number of CPUs whose time this process may use. A quota can make it smaller than the number
    of `cpus`.
    """
    n_threads = settings.threads or max(1, n_usable // (settings.n_workers * settings.tp))
    per_worker = settings.tp * n_threads
    if not settings.n_workers * per_worker == n_usable == len(cpus):
        return n_threads, []
    firsts = range(0, n_usable, per_worker)
    return n_threads, [list(cpus[first : first + per_worker]) for first in firsts]


def _follow_loading(index: int, on_progress: OnProgress, message: dict[str, Any]) -> None:
    if "loaded_bytes" in message:
        on_progress(index, message["loaded_bytes"], message["total_bytes"])


def _complain(what: str) -> None:
    sys.stderr.write(f"orcinus: {what}\n")
    sys.stderr.flush()
