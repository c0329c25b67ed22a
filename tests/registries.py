"""The metrics registry of each service, as its process makes it. Every metric has been used once,
so that it exposes its labels."""

import asyncio
from collections.abc import Mapping

from orcinus.v1 import worker_pb2
from prometheus_client import CollectorRegistry

from services.common.metrics import new_registry
from services.frontend.api_keys import ApiKeys
from services.frontend.observing.metrics import FrontendMetrics, FrontendState, ModelFigures
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.scheduler.observing.metrics import SchedulerMetrics
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.pipeline.shortfall import UnfitWorker
from services.worker.controller.controller import Controller
from services.worker.controller.metrics import WorkerMetrics
from tests.fakes import describe_stage
from tests.scheduler.core.workload import build


async def registries() -> Mapping[str, CollectorRegistry]:
    """Returns the registries by the name of the service."""
    made = {name: new_registry() for name in ("frontend", "scheduler", "worker")}
    _frontend(made["frontend"])
    _scheduler(made["scheduler"])
    made["worker"].register(WorkerMetrics(Controller(tp_size=1)))
    await asyncio.sleep(0)
    return made


def _frontend(registry: CollectorRegistry) -> None:
    metrics = FrontendMetrics(registry)
    registry.register(
        FrontendState(
            models=lambda: [
                ModelFigures(name="demo", is_up=False, n_held=0, n_resubmitted=0, n_viewers=0)
            ],
            n_in_flight=lambda: 0,
            reason_against_serving=lambda: "no pipeline for 5 s",
            refusals=ApiKeys(None).refusals,
        )
    )
    request = GenerationRequest(prompts=("a",), options=GenerationOptions())
    with metrics.call(request, model="demo") as call:
        call.took_tokens(0)
        call.finished(0, FinishReason.STOP, n_tokens=2)
    metrics.count_http("/v1/models", 200)
    with metrics.counted(None)("orcinus.v1.InferenceService/Generate", None):
        pass


def _scheduler(registry: CollectorRegistry) -> None:
    members = tuple(Member(f"{index}:1", describe_stage(index, 3)) for index in range(3))
    scheduler = build(max_batch_size=4, n_blocks=16, block_size=4, pipeline_depth=2)
    metrics = SchedulerMetrics(registry)
    metrics.note_unfit((UnfitWorker("1:1", "pod", "block_size 16, not 32"),))
    metrics.ask_state(lambda: "serving")
    epoch = metrics.observe(Pipeline("p", 1, members), scheduler)
    epoch.opened()
    epoch.timed(1, worker_pb2.IterationTiming(iteration=1))
