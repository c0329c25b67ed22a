"""`python -m services.worker`: one pipeline stage, that is a controller and its ranks."""

import asyncio
import contextlib
import logging
import sys

from services.common import metrics, process, rpc, rpc_handlers, tls, tracing
from services.common.cpus import usable_cpus
from services.common.health import Health
from services.common.telemetry import configure_logging
from services.worker.channel import MessageKind
from services.worker.controller.controller import SERVICE, Controller
from services.worker.controller.metrics import WorkerMetrics
from services.worker.controller.profile_orders import Profiles
from services.worker.controller.rank_process import RankProcess
from services.worker.controller.service import CALLERS, RAW_METHODS, WorkerService
from services.worker.controller.stage_tracer import StageTracer
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
        self.n_bytes_loaded = 0
        self.n_bytes = 0

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """A rank sent a frame."""
        if kind is not MessageKind.PROGRESS:
            self._controller.on_message(tp_rank, kind, payload)
            return
        n_done, n_total = (int(number) for number in payload.split())
        self._loaded[tp_rank] = (n_done, n_total)
        done, total = (sum(column) for column in zip(*self._loaded.values(), strict=True))
        self.n_bytes_loaded, self.n_bytes = done, total
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
    connect = tls.connector(settings.tls_dir, role=tls.WORKER)
    profiles = Profiles(settings.profile_dir, stage_index=settings.place)
    controller = controller_class(tp_size=settings.tp_size, connect=connect, profiles=profiles)
    relay = ProgressRelay(controller, pipe)
    # Before any gRPC object: these have threads, and threads and child processes do not mix.
    ranks = [
        await RankProcess.start(
            settings.for_rank(tp_rank),
            relay,
            module=rank_module,
            n_threads=settings.n_threads or max(1, usable_cpus() // settings.tp_size),
            cpus=settings.cpus_of(tp_rank),
        )
        for tp_rank in range(settings.tp_size)
    ]
    controller.attach(ranks)
    traces = tracing.start("orcinus-worker", decides=True)
    if traces.is_on:
        controller.tracer = StageTracer(traces.tracer, settings.place)
    registry = metrics.new_registry()
    registry.register(WorkerMetrics(controller, relay))
    listener = contextlib.ExitStack()
    metrics_address = listener.enter_context(metrics.listening(settings.metrics_address, registry))
    health = Health(SERVICE.full_name)
    await health.start()
    probed = await health.listen(settings.health_address)
    server = rpc.create_server()
    health.add_to(server)
    handler = rpc_handlers.service_handler(
        SERVICE,
        WorkerService(controller),
        raw=RAW_METHODS,
        callers=tls.callers(settings.tls_dir, CALLERS),
    )
    server.add_generic_rpc_handlers((handler,))
    address = rpc.bind(server, settings.address, tls.server_credentials(settings.tls_dir))
    await server.start()
    pipe.report({"address": address, "metrics": metrics_address})
    watching = asyncio.create_task(controller.watch_ranks(settings.rank_silence_limit_s))
    loading = asyncio.create_task(controller.wait_until_loaded())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(
            (loading, stopping, controller.failure), return_when=asyncio.FIRST_COMPLETED
        )
        if loading.done() and not stop.is_set() and not controller.failure.done():
            await health.set_started()
            await health.set_ready(True)
            await health.set_serving(True)
            pipe.report({"ready": True})
            log.info("stage %d of %d on %s", settings.place, settings.n_stages, address)
            await asyncio.wait((stopping, controller.failure), return_when=asyncio.FIRST_COMPLETED)
        return outcome(controller)
    finally:
        loading.cancel()
        stopping.cancel()
        watching.cancel()
        await health.set_ready(False)
        await health.set_serving(False)
        has_failed = controller.failure.done()
        if has_failed:
            await health.set_alive(False)
            await asyncio.sleep(FLUSH_S)
        await controller.close()
        await server.stop(grace=0)
        # When one is lost, the others of its stage may wait for it for a long time.
        await asyncio.gather(*(rank.stop(by_force=has_failed) for rank in ranks))
        if probed is not None:
            await probed.stop(grace=0)
        listener.close()
        await asyncio.to_thread(traces.close)


def outcome(controller: Controller) -> int:
    """The exit status: 1 if a rank was lost."""
    if not controller.failure.done():
        return 0
    log.error("stopping: %s", controller.failure.result())
    return 1


def main(rank_module: str = RANK_MODULE, controller_class: type[Controller] = Controller) -> int:
    """Runs a stage; benchmarks put other ranks and another way of handing plans on in."""
    settings = WorkerSettings.load("worker", sys.argv[1:])
    configure_logging(
        f"worker {settings.place}", settings.log_level, log_format=settings.log_format
    )
    if settings.ready_fd is not None:
        process.die_with_parent()
    try:
        return process.run(serve(settings, rank_module, controller_class))
    except OSError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
