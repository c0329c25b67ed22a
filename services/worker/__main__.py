"""`python -m services.worker`: one pipeline stage, that is a controller and its ranks."""

import asyncio
import logging
import sys

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import process, rpc
from services.common.telemetry import configure_logging
from services.worker.channel import MessageKind
from services.worker.controller import SERVICE, Controller
from services.worker.rank_process import RankProcess
from services.worker.service import RAW_METHODS, WorkerService
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

RANK_MODULE = "services.worker.rank"
FLUSH_S = 0.5  # for the last report to the engine master


class ProgressRelay:
    """Passes what ranks say to the controller, and their loading progress to the launcher too."""

    def __init__(self, controller: Controller, pipe: process.ReadyPipe) -> None:
        self._controller = controller
        self._pipe = pipe
        self._loaded: dict[int, tuple[int, int]] = {}

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """A rank sent a frame."""
        if kind is not MessageKind.PROGRESS:
            self._controller.on_message(tp_rank, kind, payload)
            return
        n_done, n_total = (int(number) for number in payload.split())
        self._loaded[tp_rank] = (n_done, n_total)
        done, total = (sum(column) for column in zip(*self._loaded.values(), strict=True))
        self._pipe.report({"loaded_bytes": done, "total_bytes": total})

    def on_exit(self, tp_rank: int, reason: str) -> None:
        """A rank is gone."""
        self._controller.on_exit(tp_rank, reason)


async def serve(
    settings: WorkerSettings, rank_module: str, controller_class: type[Controller]
) -> int:
    """Serves until told to stop (0) or until a rank is lost (1)."""
    stop = process.stop_event()
    pipe = process.ReadyPipe(settings.ready_fd)
    controller = controller_class(tp_size=settings.tp_size)
    relay = ProgressRelay(controller, pipe)
    # Before any gRPC object: these have threads, and threads and child processes do not mix.
    ranks = [
        await RankProcess.start(
            settings.for_rank(tp_rank), relay, module=rank_module, n_threads=settings.n_threads
        )
        for tp_rank in range(settings.tp_size)
    ]
    controller.attach(ranks)
    server = rpc.create_server()
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set(SERVICE.full_name, health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_generic_rpc_handlers(
        (rpc.service_handler(SERVICE, WorkerService(controller), raw=RAW_METHODS),)
    )
    address = rpc.bind(server, settings.address)
    await server.start()
    pipe.report({"address": address})
    loading = asyncio.create_task(controller.wait_until_loaded())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(
            (loading, stopping, controller.failure), return_when=asyncio.FIRST_COMPLETED
        )
        if loading.done() and not stop.is_set() and not controller.failure.done():
            await checks.set(SERVICE.full_name, health_pb2.HealthCheckResponse.SERVING)
            pipe.report({"ready": True})
            log.info("stage %d of %d on %s", settings.stage_index, settings.n_stages, address)
            await asyncio.wait((stopping, controller.failure), return_when=asyncio.FIRST_COMPLETED)
        return outcome(controller)
    finally:
        loading.cancel()
        stopping.cancel()
        await checks.enter_graceful_shutdown()
        if controller.failure.done():
            await asyncio.sleep(FLUSH_S)
        await controller.close()
        await server.stop(grace=0)
        await asyncio.gather(*(rank.stop() for rank in ranks))


def outcome(controller: Controller) -> int:
    """The exit status: 1 if a rank was lost."""
    if not controller.failure.done():
        return 0
    log.error("stopping: %s", controller.failure.result())
    return 1


def main(rank_module: str = RANK_MODULE, controller_class: type[Controller] = Controller) -> int:
    """Runs a stage; benchmarks put other ranks and another way of handing plans on in."""
    settings = WorkerSettings.load("worker", sys.argv[1:])
    configure_logging(f"worker {settings.stage_index}", settings.log_level)
    if settings.ready_fd is not None:
        process.die_with_parent()
    try:
        return process.run(serve(settings, rank_module, controller_class))
    except OSError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
