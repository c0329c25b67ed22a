"""Starts the services of a local system, and stops them in reverse order.

The workers start first. The scheduler of each model is next, and needs the addresses of the model's
workers. A frontend is last, and needs the addresses of the schedulers. A service reports its
address before it is ready, so that the services load side by side. Further frontends, which share
the ports of the first one, and spare workers start once all services serve, so that they delay no
other start.

Once all services serve, a service that dies or hangs is started again, unless the setting
`fail_fast` is true. If a service of one of several models cannot be started any more, the other
models are still served.
"""

import asyncio
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from services.common.address import Address, loopback, parse, reachable, reserve_port
from services.common.model_task import ModelTask
from services.local import service_options
from services.local.child import Child, OnMessage
from services.local.memory_directory import MemoryDirectory
from services.local.restart_limit import RestartLimit
from services.local.settings import LocalSettings
from services.local.supervisor import Supervisor

HEAD_START_S = 1.0
"""Seconds between the loss of a worker and its restart, in a system with spare workers. Meanwhile a
spare loads the weights of the lost worker, and has the processors for itself."""
ADDRESS_LIMIT_S = 10.0
"""Timeout in seconds for spare workers and further frontends to report the addresses of their
metrics."""
OnProgress = Callable[[int, int, int], None]
"""A function that is called with the index of a worker, the number of bytes of weights that the
worker has loaded, and the number that it loads in all."""


@dataclass(frozen=True, slots=True)
class LocalAddresses:
    """The addresses of the frontend's APIs and of the services' metrics, as host:port, and
    properties of the served models."""

    http: str
    grpc: str
    metrics: dict[str, str]
    """Addresses of the services' metrics, by the services' names; empty without metrics."""
    task: ModelTask = "text"
    """What clients mostly ask the first model for."""
    reports: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """The rows of each model's CheckpointReport, keyed by the model's name."""


class Launcher:
    """Runs the processes of a local system: workers and a scheduler for each model, and one or more
    frontends. At the end of the `async with` block, all processes have ended."""

    worker_module = "services.worker"  # benchmarks override these two modules
    scheduler_module = "services.scheduler"

    def __init__(self, settings: LocalSettings) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future that is done when the system cannot serve any more, because a service that is
        needed has ended and is not restarted.

        Its result is the reason why that service ended.
        """
        self._settings = settings
        self._host = loopback()  # where services listen for one another
        self._waves: list[list[Supervisor]] = []  # each wave starts and stops together
        self._has_started = False
        self._lost_models: set[int] = set()
        self._n_lost_workers: Counter[int] = Counter()  # by model
        self._n_lost_frontends = 0
        self._memory: MemoryDirectory | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for wave in reversed(self._waves):
            await asyncio.gather(*(service.stop() for service in wave))
        if self._memory is not None:
            self._memory.remove()

    async def start(self, on_progress: OnProgress) -> LocalAddresses:
        """Starts all services, waits until they serve, and returns the addresses.

        Raises:
            ChildDied: a service ended before it served. The reason becomes the result of
                `self.death`.
            OSError: a process cannot be started.
        """
        self._waves = [[], [], []]
        settings = self._settings
        if settings.keeps_kv:
            self._memory = MemoryDirectory.make()
        indices = range(settings.n_workers)
        ports = {it: reserve_port(self._host) for it in indices if settings.is_spare(it)}
        workers = {
            it: await self._start_worker(it, on_progress) for it in indices if it not in ports
        }
        of_workers = [
            str(self._address_at(ports[it]))
            if it in ports
            else await workers[it].wait_for("address")
            for it in indices
        ]
        n_each = settings.n_workers_each
        schedulers = [
            await self._start_scheduler(model, of_workers[model * n_each : (model + 1) * n_each])
            for model in range(len(settings.model))
        ]
        addresses = [await scheduler.wait_for("address") for scheduler in schedulers]
        frontend = await self._start_frontend(addresses)
        await asyncio.gather(
            *(child.wait_for("ready") for child in (*workers.values(), *schedulers)),
            frontend.wait_for("http"),
        )
        self._has_started = True
        if self._survives_losses:
            for service in (service for wave in self._waves for service in wave):
                service.begin_restarts()
        frontends = [frontend, *await self._start_further_frontends(addresses, frontend)]
        workers.update(await self._start_spares(ports, on_progress))
        if settings.metrics:
            await _until_known(
                *(worker.wait_for("address") for worker in workers.values()),
                *(it.wait_for("http") for it in frontends),
            )
        return self._addresses(workers, schedulers, frontends)

    async def _start_further_frontends(
        self, schedulers: Sequence[str], first: Child
    ) -> list[Child]:
        """Starts all frontends after the first one, and returns them. A frontend that cannot be
        started is left out, because the system serves without it."""
        found = []
        for number in range(2, self._settings.n_frontends + 1):
            try:
                found.append(await self._start_frontend(schedulers, number=number, beside=first))
            except OSError as error:
                _complain(f"frontend {number} cannot be started: {error}")
        return found

    async def _start_spares(
        self, ports: Mapping[int, socket.socket], on_progress: OnProgress
    ) -> dict[int, Child]:
        """Starts the spare workers, and returns them keyed by index. `ports` has the socket that
        reserves the port of each spare, keyed by index. A spare that cannot be started is left out,
        because the system serves without it."""
        spares = {}
        for index, port in ports.items():
            address = self._address_at(port)
            port.close()
            try:
                spares[index] = await self._start_worker(index, on_progress, address=address)
            except OSError as error:
                _complain(f"worker {index} cannot be started as a spare: {error}")
        return spares

    def _address_at(self, port: socket.socket) -> Address:
        return Address(self._host, port.getsockname()[1])

    def _addresses(
        self,
        workers: Mapping[int, Child],
        schedulers: Sequence[Child],
        frontends: Sequence[Child],
    ) -> LocalAddresses:
        """Returns the addresses and properties that the services have reported. `workers` are keyed
        by index."""
        metrics = {
            child.name: child.said["metrics"]
            for child in (*workers.values(), *schedulers, *frontends)
            if child.said.get("metrics") is not None
        }
        frontend = frontends[0]
        http, grpc = (str(reachable(parse(frontend.said[api]))) for api in ("http", "grpc"))
        names, n_each = self._settings.model_names, self._settings.n_workers_each
        reports = {
            names[index // n_each]: worker.said["checkpoint"]
            for index, worker in workers.items()
            if "checkpoint" in worker.said  # the first stage of each pipeline
        }
        return LocalAddresses(http, grpc, metrics, frontend.said["task"], reports)

    async def _start(
        self,
        wave: int,
        name: str,
        module: str,
        options: dict[str, object],
        *,
        model: int | None = None,
        ready_keys: Collection[str] = ("ready",),
        on_message: OnMessage = lambda _: None,
        limit: RestartLimit | None = None,
        has_spare: bool = False,
        give_up: Callable[[str], None] | None = None,
    ) -> Child:
        """Starts a service as part of a wave, which is a group of services that stop together.
        `model` is the index of the model to which the service belongs, or None for a frontend. The
        service is ready when it has reported a true value for one of `ready_keys`. `give_up` is
        called with the reason when the service has ended and is not restarted. By default, the
        model of the service is then not served any more."""
        if model is not None and len(self._settings.model) > 1:
            name = f"{self._settings.model_names[model]}: {name}"
        metrics = service_options.free_address(self._host) if self._settings.metrics else None
        service = Supervisor(
            name,
            module,
            {
                **options,
                "metrics-address": metrics,
                "log-level": self._settings.log_level,
            },
            ready_keys=ready_keys,
            on_message=on_message,
            tell=_complain,
            give_up=give_up
            or (self._note_death if model is None else partial(self._lose_model, model)),
            limit=limit or RestartLimit(),
            has_spare=has_spare,
        )
        child = await service.start()
        if self._survives_losses:
            service.begin_restarts()
        self._waves[wave].append(service)
        return child

    @property
    def _survives_losses(self) -> bool:
        """Whether the system goes on when a service ends: all services have served, and the setting
        `fail_fast` is false."""
        return self._has_started and not self._settings.fail_fast

    def _note_death(self, reason: str) -> None:
        if not self.death.done():
            self.death.set_result(reason)

    def _lose_model(self, model: int, reason: str) -> None:
        """Notes that a service of a model has ended and is not restarted, so that the model is not
        served any more. The other models are still served, unless services are still starting or
        `fail_fast` is true."""
        self._lost_models.add(model)
        n_left = len(self._settings.model) - len(self._lost_models)
        if self._survives_losses and n_left:
            _complain(f"{reason}; {self._settings.model_names[model]} is not served any more")
        else:
            self._note_death(reason)

    def _lose_worker(self, model: int, reason: str) -> None:
        """Notes that a worker of a model has ended and is not restarted. The model is still served
        if it has as many workers as its pipelines need, unless services are still starting or
        `fail_fast` is true."""
        self._n_lost_workers[model] += 1
        if self._survives_losses and self._n_lost_workers[model] <= self._settings.n_spares_each:
            _complain(f"{reason}; there is one spare less")
        else:
            self._lose_model(model, reason)

    def _lose_frontend(self, reason: str) -> None:
        """Notes that a frontend is not restarted. The models are served as long as another frontend
        is left, unless services are still starting or `fail_fast` is true."""
        self._n_lost_frontends += 1
        if self._survives_losses and self._n_lost_frontends < self._settings.n_frontends:
            _complain(f"{reason}; there is one frontend less")
        else:
            self._note_death(reason)

    async def _start_worker(
        self, index: int, on_progress: OnProgress, *, address: Address | None = None
    ) -> Child:
        """Starts a worker, which listens at `address`, or at a free port if `address` is None."""
        options = self.worker_options(index)
        model, number = divmod(index, self._settings.n_workers_each)
        name = f"stage {number}" if self._settings.has_fixed_stages else f"worker {number}"
        return await self._start(
            0,
            name,
            self.worker_module,
            options if address is None else {**options, "address": address},
            model=model,
            ready_keys=("ready", "waits_for_stage"),
            on_message=partial(_follow_loading, index, on_progress),
            limit=RestartLimit(ready_pause_s=HEAD_START_S if self._settings.has_spares else 0),
            give_up=partial(self._lose_worker, model),
        )

    def worker_options(self, index: int) -> dict[str, object]:
        """Returns the settings of a worker, keyed by option of its command line. `index` counts the
        workers of all models. The workers of a model have consecutive numbers."""
        memory = None if self._memory is None else self._memory.path
        return service_options.of_worker(
            self._settings, index, host=self._host, kv_directory=memory
        )

    async def _start_scheduler(self, model: int, workers: list[str]) -> Child:
        return await self._start(
            1,
            "scheduler",
            self.scheduler_module,
            self.scheduler_options(workers),
            model=model,
            has_spare=self._settings.has_spares,
        )

    def scheduler_options(self, workers: list[str]) -> dict[str, object]:
        """Returns the settings of the scheduler of a model, keyed by option of its command line.

        `workers` are the addresses of the model's workers. If there is only one pipeline, they are
        ordered by the stages of the workers.
        """
        return service_options.of_scheduler(self._settings, workers, host=self._host)

    async def _start_frontend(
        self, schedulers: Sequence[str], *, number: int = 1, beside: Child | None = None
    ) -> Child:
        """Starts the frontend that has the number `number`, counted from 1. If `beside` is given,
        the new frontend serves the same ports as the frontend `beside`."""
        options = self.frontend_options(*schedulers)
        if beside is not None:
            options |= {f"{api}-address": beside.said[api] for api in ("http", "grpc")}
        return await self._start(
            2,
            "frontend" if number == 1 else f"frontend {number}",
            "services.frontend",
            options,
            ready_keys=("http",),
            has_spare=self._settings.has_spares and self._settings.n_frontends == 1,
            give_up=self._lose_frontend,
        )

    def frontend_options(self, *schedulers: str) -> dict[str, object]:
        """Returns the settings of the frontend, keyed by option of its command line.

        `schedulers` has the address of the scheduler of each model.
        """
        return service_options.of_frontend(self._settings, schedulers)


async def _until_known(*addresses: Coroutine[Any, Any, object]) -> None:
    """Waits until all services have reported their addresses, but at most `ADDRESS_LIMIT_S`
    seconds. Each of `addresses` waits for the address of one service. A service that has died
    reports no address, and is ignored."""
    waiting = [asyncio.create_task(address) for address in addresses]
    await asyncio.wait(waiting, timeout=ADDRESS_LIMIT_S)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def _follow_loading(index: int, on_progress: OnProgress, message: dict[str, Any]) -> None:
    if "loaded_bytes" in message:
        on_progress(index, message["loaded_bytes"], message["total_bytes"])


def _complain(what: str) -> None:
    sys.stderr.write(f"orcinus: {what}\n")
    sys.stderr.flush()
