"""`python -m services.scheduler`: waits for the stages, forms the pipeline, serves frontends."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from orcinus.v1 import scheduler_pb2

from services.common import process, rpc
from services.common.errors import Unavailable
from services.common.telemetry import configure_logging
from services.scheduler.engine_master import EngineMaster, PipelineLost
from services.scheduler.iteration_log import IterationLog
from services.scheduler.kv_manager import KVManager
from services.scheduler.membership import Pipeline, gather
from services.scheduler.policies.orca import OrcaPolicy
from services.scheduler.request_pool import RequestPool
from services.scheduler.scheduler import Scheduler
from services.scheduler.service import SchedulerService
from services.scheduler.serving_loop import ServingLoop
from services.scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
POLICIES = {"orca": OrcaPolicy}
FLUSH_S = 1.0  # for the last messages to frontends


def build_scheduler(settings: SchedulerSettings, pipeline: Pipeline) -> Scheduler:
    """The scheduling core for a pipeline: its memory, its policy, its depth."""
    block_size = pipeline.first.block_size
    n_blocks = pipeline.n_kv_blocks
    if settings.n_slots is not None:
        n_blocks = min(n_blocks, settings.n_slots // block_size)
    if n_blocks == 0:
        raise Unavailable(f"n_slots: {settings.n_slots} is less than a block of {block_size} slots")
    return Scheduler(
        RequestPool(max_requests=settings.max_requests),
        KVManager(n_blocks=n_blocks, block_size=block_size),
        policy=POLICIES[settings.policy](max_batch_size=settings.max_batch_size),
        pipeline_depth=settings.pipeline_depth or pipeline.n_stages,
    )


def describe(pipeline: Pipeline, scheduler: Scheduler) -> scheduler_pb2.PipelineDescription:
    """What frontends are told of the pipeline."""
    first = pipeline.first
    return scheduler_pb2.PipelineDescription(
        model=first.model,
        vocab_size=first.vocab_size,
        max_model_len=min(first.max_model_len, scheduler.kv_manager.n_slots),
        eos_token_ids=first.eos_token_ids,
        n_stages=pipeline.n_stages,
        tp_size=first.tp_size,
    )


async def serve(settings: SchedulerSettings) -> int:
    """Serves until told to stop (0) or until the pipeline is lost (1).

    Raises:
        Unavailable: there are no stages that form a pipeline.
    """
    stop = process.stop_event()
    server = rpc.create_server()
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set(SERVICE.full_name, health_pb2.HealthCheckResponse.NOT_SERVING)
    service = SchedulerService()
    server.add_generic_rpc_handlers((rpc.service_handler(SERVICE, service),))
    address = rpc.bind(server, settings.address)
    await server.start()
    pipe = process.ReadyPipe(settings.ready_fd)

    async def announce() -> None:
        await checks.set(SERVICE.full_name, health_pb2.HealthCheckResponse.SERVING)
        pipe.report({"ready": True})

    try:
        pipe.report({"address": address})
        gathering = asyncio.create_task(
            gather(
                settings.stage_addresses,
                pipeline_id=settings.pipeline_id,
                timeout_s=settings.start_timeout_s,
            )
        )
        if not await finished_first(gathering, stop):
            return 0
        return await serve_pipeline(settings, gathering.result(), service, stop, announce)
    finally:
        await checks.enter_graceful_shutdown()
        await server.stop(grace=FLUSH_S)


async def serve_pipeline(
    settings: SchedulerSettings,
    pipeline: Pipeline,
    service: SchedulerService,
    stop: asyncio.Event,
    announce: Callable[[], Awaitable[None]],
) -> int:
    """Forms one epoch and serves it to its end."""
    scheduler = build_scheduler(settings, pipeline)
    iteration_log = IterationLog(epoch=pipeline.epoch, n_stages=pipeline.n_stages)
    has_news = asyncio.Event()
    engine = EngineMaster(
        pipeline,
        wake=has_news.set,
        on_timing=iteration_log.timed,
        silence_limit_s=settings.silence_limit_s,
    )
    loop = ServingLoop(
        scheduler,
        engine,
        deliver=service.deliver,
        iteration_log=iteration_log,
        has_news=has_news,
    )
    try:
        starting = asyncio.create_task(engine.start())
        if not await finished_first(starting, stop):
            return 0
        starting.result()
        service.open(describe(pipeline, scheduler), loop, iteration_log)
        await announce()
        log.info(
            "epoch %d: %d stages, %d K/V slots",
            pipeline.epoch,
            pipeline.n_stages,
            scheduler.kv_manager.n_slots,
        )
        return await run_to_the_end(loop, service, stop, settings.drain_s)
    finally:
        iteration_log.close()
        await engine.close()


async def run_to_the_end(
    loop: ServingLoop, service: SchedulerService, stop: asyncio.Event, drain_s: float
) -> int:
    """Runs the loop; on the way out every request that is left ends as UNAVAILABLE."""
    serving = asyncio.create_task(loop.run(), name="serving loop")
    status = 0
    try:
        if not await finished_first(serving, stop, cancel=False):
            log.info("draining for at most %g s", drain_s)
            service.close()
            loop.drain()
            await asyncio.wait_for(serving, drain_s)
        serving.result()
    except PipelineLost as loss:
        log.error("stopping: %s", loss.message)
        service.fail_all(loss.message)
        status = 1
    except TimeoutError:
        service.fail_all("the scheduler is stopping")
    return status


async def finished_first(
    task: asyncio.Task[Any], stop: asyncio.Event, *, cancel: bool = True
) -> bool:
    """Whether a task finished before the event was set; if not, it is cancelled on request."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done() and cancel:
        task.cancel()
    return task.done()


def main() -> int:
    settings = SchedulerSettings.load("scheduler", sys.argv[1:])
    configure_logging("scheduler", settings.log_level)
    if settings.ready_fd is not None:
        process.die_with_parent()
    try:
        return process.run(serve(settings))
    except (Unavailable, OSError) as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
