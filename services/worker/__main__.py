"""`python -m services.worker`: runs one pipeline stage, which is a controller and its ranks.

listen → get a stage, from the settings or by assignment → load its weights → serve
"""

import asyncio
import logging
import socket
import sys
from typing import Any

from services.common import process, tls, tracing
from services.common.ending import give_up
from services.common.telemetry import configure_logging
from services.worker.controller.controller import Controller
from services.worker.controller.endpoints import WorkerEndpoints
from services.worker.controller.plan_relay import PlanRelay
from services.worker.controller.profile_orders import ProfileOrders
from services.worker.controller.rank_process import place_ranks, start_ranks
from services.worker.controller.stage_tracer import StageTracer
from services.worker.settings import PipelinePlace, WorkerSettings

log = logging.getLogger(__name__)

RANK_MODULE = "services.worker.rank"
FLUSH_S = 0.5
"""Timeout in seconds for sending the last reports to the engine master. Afterwards, the last trace
spans are sent to the collector with the same timeout. No pipeline can use this worker again before
both have ended."""

SPARE_AFTER_S = 15.0
"""Seconds without a stage after which a worker counts as a spare. A leader that needs the worker
assigns a stage sooner."""


async def serve(settings: WorkerSettings, rank_module: str, plan_relay: type[PlanRelay]) -> int:
    """Serves until the process must stop. Returns the exit status: 1 if a rank was lost, otherwise
    0."""
    stop = process.stop_event()
    pipe = process.ReadyPipe(settings.ready_fd)
    controller = controller_of(settings, pipe, plan_relay)
    # Child processes are started before gRPC objects, which start threads.
    ranks = await start_ranks(settings, controller, module=rank_module)
    traces = tracing.start("orcinus-worker", decides=True)
    endpoints = await WorkerEndpoints.open(settings, controller)
    controller.name = name_of(endpoints.address)
    pipe.report({"address": endpoints.address, "metrics": endpoints.metrics_address})
    failure = controller.rank_watch.failure
    tasks = [asyncio.create_task(until_end(controller, stop, drain_s=settings.drain_s))]
    try:
        place = await place_of(controller, endpoints, tasks[0])
        if place is not None:
            pipe.report({"waits_for_stage": False})
            tracer = StageTracer(traces.tracer, place.stage_index) if traces.is_on else None
            controller.attach(ranks, tracer=tracer)
            place_ranks(place, ranks)
            watch = controller.rank_watch.watch(settings.silence_limit_s)
            tasks.append(asyncio.create_task(watch))
            if await has_loaded(settings, controller, tasks[0]):
                await endpoints.say_ready(True)
                pipe.report({"ready": True})
                log.info("%s on %s", place, endpoints.address)
            await tasks[0]
        return outcome(controller, settings)
    finally:
        for task in tasks:
            task.cancel()
        has_failed = failure.done()
        await controller.end()  # first, so that the end of the ranks is not a failure
        # Ranks are killed before anything waits, so that their peers see closed sockets at once,
        # and that a busy rank does not hold up the end of this process.
        for rank in ranks:
            rank.kill()
        await endpoints.say_stopping(has_failed=has_failed)
        await endpoints.stop_service(FLUSH_S)
        await asyncio.gather(*(rank.stop() for rank in ranks))
        await endpoints.close()
        await asyncio.to_thread(traces.close, FLUSH_S)


def controller_of(
    settings: WorkerSettings, pipe: process.ReadyPipe, plan_relay: type[PlanRelay]
) -> Controller:
    """Returns the controller of a worker. The controller reports to the launcher through `pipe`: it
    reports the checkpoint, the progress of loading, and whether the worker still waits for a
    stage."""

    def note_started() -> None:
        pipe.report({"waits_for_stage": controller.assignment.place is None})

    controller = Controller(
        tp_size=settings.tp_size,
        place=settings.place,
        connect=tls.connector(settings.tls_dir, role=tls.WORKER),
        profile_orders=ProfileOrders(settings.profile_dir),
        on_progress=lambda n_done, n_total: pipe.report(
            {"loaded_bytes": n_done, "total_bytes": n_total}
        ),
        on_checkpoint=lambda rows: pipe.report({"checkpoint": rows}),
        on_started=note_started,
        plan_relay=plan_relay,
    )
    return controller


def name_of(address: str) -> str:
    """Returns the host and port of a worker, as a name for logs. In Kubernetes, the host is the
    name of the pod."""
    return f"{socket.gethostname()}:{address.rpartition(':')[2]}"


async def place_of(
    controller: Controller, endpoints: WorkerEndpoints, ending: asyncio.Task[None]
) -> PipelinePlace | None:
    """Waits until the worker has a stage, from the settings or by assignment, and returns the
    stage. Returns None if the task `ending` ends first, because the worker must end.

    A worker without a stage for SPARE_AFTER_S seconds counts as a spare. A spare is ready, and may
    be assigned a stage later.
    """
    waiting = asyncio.create_task(controller.assignment.wait())
    try:
        await asyncio.wait(
            (waiting, ending), timeout=SPARE_AFTER_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not waiting.done():
            log.info("a spare, without a stage, on %s", endpoints.address)
            await endpoints.say_ready(True)
            await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
            await endpoints.say_ready(False)
        return None if ending.done() else waiting.result()
    finally:
        waiting.cancel()


async def has_loaded(
    settings: WorkerSettings, controller: Controller, ending: asyncio.Task[None]
) -> bool:
    """Waits until the ranks have loaded their weights. Returns False if the task `ending` ends
    first, because the worker must end.

    Declares the stage failed if loading takes longer than `load_limit_s`.
    """
    loading = asyncio.create_task(controller.loading.wait())
    try:
        await asyncio.wait(
            (loading, ending), timeout=settings.load_limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not loading.done() and not ending.done():
            controller.rank_watch.lose(f"no weights within {settings.load_limit_s:g} s")
        return loading.done() and not ending.done()
    finally:
        loading.cancel()


async def until_end(controller: Controller, stop: asyncio.Event, *, drain_s: float) -> None:
    """Waits until a rank is lost, the leader recalls the worker from its stage, or `stop` is set.
    After `stop`, waits further until no leader needs the stage (`departure.py`), but at most
    `drain_s` seconds."""
    recalled = asyncio.create_task(controller.assignment.is_recalled.wait())
    leaving = asyncio.create_task(leave(controller, stop, drain_s=drain_s))
    ends: list[asyncio.Future[Any]] = [recalled, leaving, controller.rank_watch.failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        recalled.cancel()
        leaving.cancel()


async def leave(controller: Controller, stop: asyncio.Event, *, drain_s: float) -> None:
    """Waits until `stop` is set. Then waits until no leader has needed the worker for LINGER_S
    seconds, but at most `drain_s` seconds."""
    await stop.wait()
    log.info("told to stop: serving for %g s at most, until its pipeline can do without", drain_s)
    await controller.leave(drain_s)


def outcome(controller: Controller, settings: WorkerSettings) -> int:
    """Logs why the worker ends, and returns the exit status: 1 if a rank was lost, otherwise 0."""
    failure = controller.rank_watch.failure
    if failure.done():
        return give_up(failure.result(), ready_fd=settings.ready_fd, log_format=settings.log_format)
    if controller.assignment.is_recalled.is_set():
        log.info("ending: %s", controller.assignment.recalled_for)
    return 0


def main(rank_module: str = RANK_MODULE, plan_relay: type[PlanRelay] = PlanRelay) -> int:
    """Runs a worker until its end and returns the exit status. Benchmarks pass another module for
    the rank processes and another plan relay."""
    settings = WorkerSettings.load("worker", sys.argv[1:])
    name = "worker" if settings.stage_index is None else f"worker {settings.stage_index}"
    configure_logging(name, settings.log_level, log_format=settings.log_format)
    if settings.ready_fd is not None:
        process.die_with_parent()
    process.wait_for_turn(settings.turn_fd, ready_fd=settings.ready_fd)
    try:
        return process.run(serve(settings, rank_module, plan_relay), ready_fd=settings.ready_fd)
    except OSError as error:
        return give_up(error, ready_fd=settings.ready_fd, log_format=settings.log_format)


if __name__ == "__main__":
    sys.exit(main())
