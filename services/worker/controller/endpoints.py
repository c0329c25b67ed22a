"""Opens the ports of a stage, which serve gRPC, health and metrics."""

import contextlib
from typing import Self

import grpc.aio

from services.common import metrics, rpc, rpc_handlers, tls
from services.common.health import Health
from services.worker.controller.controller import Controller
from services.worker.controller.metrics import WorkerMetrics
from services.worker.controller.service import CALLERS, RAW_METHODS, SERVICE, WorkerService
from services.worker.settings import WorkerSettings


class WorkerEndpoints:
    """The servers of a stage: WorkerService, health and metrics."""

    def __init__(self) -> None:
        self.address = ""
        """Address of WorkerService and of health, host:port."""
        self.metrics_address: str | None = None
        """Address of the metrics, host:port. None if metrics are not served."""
        self._health = Health(SERVICE.full_name)
        self._listener = contextlib.ExitStack()
        self._server = rpc.create_server()
        self._probed: grpc.aio.Server | None = None

    @classmethod
    async def open(cls, settings: WorkerSettings, controller: Controller) -> Self:
        """Starts all servers. Until the worker is ready, health probes report it as started but not
        ready.

        Raises:
            OSError: an address is in use.
        """
        ends = cls()
        registry = metrics.new_registry()
        registry.register(WorkerMetrics(controller))
        ends.metrics_address = ends._listener.enter_context(
            metrics.listening(
                settings.metrics_address, registry, is_healthy=ends._health.is_healthy
            )
        )
        await ends._health.start()
        ends._probed = await ends._health.listen(settings.health_address)
        ends._health.add_to(ends._server)
        handler = rpc_handlers.service_handler(
            SERVICE,
            WorkerService(controller),
            raw=RAW_METHODS,
            callers=tls.callers(settings.tls_dir, CALLERS),
        )
        ends._server.add_generic_rpc_handlers((handler,))
        credentials = tls.server_credentials(settings.tls_dir)
        ends.address = rpc.bind(ends._server, settings.address, credentials)
        await ends._server.start()
        await ends._health.set_started()
        await ends._health.set_serving(True)
        return ends

    async def say_ready(self, is_ready: bool) -> None:
        """Sets whether health probes report the worker as ready. A worker is ready if it has loaded
        its stage, or is a spare."""
        await self._health.set_ready(is_ready)

    async def say_stopping(self, *, has_failed: bool) -> None:
        """Makes health probes report that this worker is stopping. With `has_failed`, they also
        report a failure."""
        await self._health.set_ready(False)
        await self._health.set_serving(False)
        if has_failed:
            await self._health.set_alive(False)

    async def stop_service(self, flush_s: float) -> None:
        """Stops WorkerService when its calls have ended and their last messages are sent, or after
        `flush_s` seconds. The servers of health and metrics keep running."""
        self._health.end()
        await self._server.stop(grace=flush_s)

    async def close(self) -> None:
        """Stops the servers of health and of metrics."""
        if self._probed is not None:
            await self._probed.stop(grace=0)
        self._listener.close()
