"""`python -m services.worker`: one pipeline stage, that is a controller and its ranks."""

import asyncio
import logging
import sys

from services.common import process, tls, tracing
from services.common.telemetry import configure_logging
from services.worker.controller.controller import Controller
from services.worker.controller.endpoints import Endpoints
from services.worker.controller.plan_relay import PlanRelay
from services.worker.controller.profile_orders import ProfileOrders
from services.worker.controller.rank_process import start_ranks
from services.worker.controller.stage_tracer import StageTracer
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

RANK_MODULE = "services.worker.rank"
FLUSH_S = 0.5
"""Time for the last report to reach the engine master."""


async def serve(settings: WorkerSettings, rank_module: str, plan_relay: type[PlanRelay]) -> int:
    """Serves until told to stop (0) or until a rank is lost (1)."""
    stop = process.stop_event()
    pipe = process.ReadyPipe(settings.ready_fd)
    controller = controller_of(settings, pipe, plan_relay)
    # Before any gRPC object: these have threads, and threads and child processes do not mix.
    ranks = await start_ranks(settings, controller, module=rank_module)
    traces = tracing.start("orcinus-worker", decides=True)
    tracer = StageTracer(traces.tracer, settings.place) if traces.is_on else None
    controller.attach(ranks, tracer=tracer)
    endpoints = await Endpoints.open(settings, controller)
    pipe.report({"address": endpoints.address, "metrics": endpoints.metrics_address})
    failure = controller.rank_watch.failure
    watching = asyncio.create_task(controller.rank_watch.watch(settings.rank_silence_limit_s))
    try:
        if await has_loaded(controller, stop):
            await endpoints.say_ready()
            pipe.report({"ready": True})
            log.info("stage %d of %d on %s", settings.place, settings.n_stages, endpoints.address)
            await until_failure(failure, stop)
        return outcome(failure)
    finally:
        watching.cancel()
        has_failed = failure.done()
        if has_failed:
            # At once: who waits for them hears of it by their sockets.
            for rank in ranks:
                rank.kill()
        await endpoints.say_stopping(has_failed=has_failed)
        if has_failed:
            await asyncio.sleep(FLUSH_S)
        await controller.close()
        await endpoints.stop_service()
        await asyncio.gather(*(rank.stop() for rank in ranks))
        await endpoints.close()
        await asyncio.to_thread(traces.close)


def controller_of(
    settings: WorkerSettings, pipe: process.ReadyPipe, plan_relay: type[PlanRelay]
) -> Controller:
    """Returns the controller of a stage, which reports its loading to the launcher."""
    return Controller(
        tp_size=settings.tp_size,
        connect=tls.connector(settings.tls_dir, role=tls.WORKER),
        profile_orders=ProfileOrders(settings.profile_dir, stage_index=settings.place),
        on_progress=lambda n_done, n_total: pipe.report(
            {"loaded_bytes": n_done, "total_bytes": n_total}
        ),
        plan_relay=plan_relay,
    )


async def has_loaded(controller: Controller, stop: asyncio.Event) -> bool:
    """Waits for the weights, and returns whether they came before the end of the stage."""
    loading = asyncio.create_task(controller.loading.wait())
    ending = asyncio.create_task(until_failure(controller.rank_watch.failure, stop))
    try:
        await asyncio.wait((loading, ending), return_when=asyncio.FIRST_COMPLETED)
        has_ended = stop.is_set() or controller.rank_watch.failure.done()
        return loading.done() and not has_ended
    finally:
        loading.cancel()
        ending.cancel()


async def until_failure(failure: asyncio.Future[str], stop: asyncio.Event) -> None:
    """Waits until a rank is lost, or until the process is told to stop."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopping, failure), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


def outcome(failure: asyncio.Future[str]) -> int:
    """Returns the exit status: 1 if a rank was lost."""
    if not failure.done():
        return 0
    log.error("stopping: %s", failure.result())
    return 1


def main(rank_module: str = RANK_MODULE, plan_relay: type[PlanRelay] = PlanRelay) -> int:
    """Runs a stage; benchmarks put in other ranks and another way of forwarding plans."""
    settings = WorkerSettings.load("worker", sys.argv[1:])
    configure_logging(
        f"worker {settings.place}", settings.log_level, log_format=settings.log_format
    )
    if settings.ready_fd is not None:
        process.die_with_parent()
    try:
        return process.run(serve(settings, rank_module, plan_relay))
    except OSError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
